"""Models of the operator's own are served like any other."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
import timm
import torch
from torchvision.transforms import functional as F

from fxcore.catalog import register
from tests.service.conftest import Client

TOML = """
[models.mine]
builder = "timm:create_model"
arguments = { model_name = "mobilenetv3_small_050", num_classes = 7 }
weights = "mine.pth"
preprocessing = { resize_size = 72, crop_size = 64 }

[models.broken]
builder = "timm:create_model"
arguments = { model_name = "no_such_model" }

[models.unfit]
builder = "timm:create_model"
arguments = { model_name = "mobilenetv3_small_050", num_classes = 8 }
weights = "mine.pth"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    torch.manual_seed(3)
    torch.save(timm.create_model("mobilenetv3_small_050", num_classes=7).state_dict(), tmp_path / "mine.pth")
    (tmp_path / "models.toml").write_text(TOML)
    yield tmp_path
    register({})


def expected(photo: bytes, folder: Path, path: str) -> np.ndarray:  # type: ignore[type-arg]
    """What a forward hook sees, of an image preprocessed by hand."""
    model = timm.create_model("mobilenetv3_small_050", num_classes=7).eval()
    model.load_state_dict(torch.load(folder / "mine.pth", weights_only=True))
    image = F.center_crop(F.resize(PIL.Image.open(io.BytesIO(photo)).convert("RGB"), 72), [64, 64])
    pixels = F.normalize(F.to_tensor(image), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    seen: list[torch.Tensor] = []
    model.get_submodule(path).register_forward_hook(lambda m, i, output: seen.append(output))
    with torch.inference_mode():
        model(pixels[None])
    return seen[0].numpy()


def test_a_model_of_ones_own_is_served(
    folder: Path,
    make_client: Callable[..., Client],
    photos: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "fxserve.models"):
        client = make_client(models_dir=folder, models=("mine", "broken", "unfit"))
    told = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("model 'broken': its builder failed: RuntimeError: Unknown model") for line in told)
    assert any(line.startswith("model 'unfit': mine.pth does not fit unfit: ") for line in told)
    (listed,) = client.get("/v1/models").json()["models"]
    assert (listed["name"], listed["weights"], listed["default_weights"]) == ("mine", ["mine.pth"], "mine.pth")
    detail = client.get("/v1/models/mine").json()
    assert detail["preprocessing"]["crop_size"] == [64]
    assert detail["weights"]["mine.pth"]["cached"] is True
    nodes = client.get("/v1/models/mine/nodes").json()
    assert "blocks.2" in {name.rpartition(".")[0].rpartition(".")[0] for name in nodes["eval_nodes"]}
    assert nodes["levels"]["C5"]["stride"] == 32
    assert client.get("/v1/models/mine/graph?format=svg").text.startswith("<svg")
    answer = client.post(
        "/v1/models/mine/features?nodes=blocks.2:map,C4",
        content=photos["chelsea"],
        headers={"Content-Type": "image/jpeg", "Accept": "application/x-safetensors"},
    )
    assert answer.status_code == 200, answer.text
    values = safetensors.numpy.load(answer.content)
    np.testing.assert_allclose(values["map"], expected(photos["chelsea"], folder, "blocks.2"), rtol=1e-3, atol=1e-4)
    metadata = client.get("/v2/models/mine").json()
    assert metadata["inputs"][1] == {"name": "x", "datatype": "FP32", "shape": [-1, 3, 64, 64]}
    raw = client.post("/v2/models/mine/infer", content=photos["chelsea"], headers={"Content-Type": "image/jpeg"})
    assert raw.status_code == 200, raw.text
    problem = client.post("/v1/extractors", json={"model": "broken", "return_nodes": ["x"]}).json()
    assert problem["type"] == "/problems/unknown-model"
    assert "'broken' was described wrongly" in problem["detail"]


def test_the_list_of_models_that_are_served_holds_for_ones_own(
    folder: Path, make_client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(models_dir=folder, models=("resnet18",))
    assert [model["name"] for model in client.get("/v1/models").json()["models"]] == ["resnet18"]
    assert client.post("/v1/models/mine/features?nodes=C4", content=b"").status_code == 404


def test_a_service_starts_without_a_file_that_is_wrong(
    tmp_path: Path, make_client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(models_dir=tmp_path)
    assert client.get("/healthz").status_code == 200
    assert "models.toml: No such file or directory" in caplog.text
