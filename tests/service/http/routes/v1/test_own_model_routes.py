"""Models of the operator's own are served like any other."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torchvision.transforms import functional as F

from fxcore.images.presets import VideoClassification
from fxcore.models.catalog import register
from tests.decoding import decoded
from tests.fxcore.hooks import hooked
from tests.service.conftest import Client
from tests.service.own_models import own_models
from tests.wire import created, read, refused, sent

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


MODULE = """
from torch import nn

class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(3, 6, 3, (1, 2, 2), 1), nn.BatchNorm3d(6), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv3d(6, 8, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, clip):
        maps = self.body(self.stem(clip))
        bright = maps > 0.1
        return self.head((maps * bright).mean((2, 3, 4)))
"""

CLIP_TOML = """
[models.clip]
builder = "own_models:Clip"
weights = "clip.safetensors"
input = "video"
preprocessing = { resize_size = [36, 54], crop_size = [32, 48] }
"""


@pytest.fixture
def clips(tmp_path: Path) -> Iterator[torch.nn.Module]:
    """A module written by hand, which takes clips, and its description."""
    with own_models(tmp_path, MODULE, CLIP_TOML) as module:
        torch.manual_seed(4)
        model = module.Clip().eval()
        safetensors.torch.save_file(model.state_dict(), tmp_path / "clip.safetensors")
        yield model


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    torch.manual_seed(3)
    torch.save(timm.create_model("mobilenetv3_small_050", num_classes=7).state_dict(), tmp_path / "mine.pth")
    (tmp_path / "models.toml").write_text(TOML)
    yield tmp_path
    register({})


@pytest.mark.exhaustive
def test_a_model_of_ones_own_is_served(
    folder: Path, make_client: Callable[..., Client], photos: dict[str, bytes], caplog: pytest.LogCaptureFixture
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
    values = read(client.post("/v1/models/mine/features?nodes=blocks.2:map,C4", **sent(photos["chelsea"])))
    model = timm.create_model("mobilenetv3_small_050", num_classes=7).eval()
    model.load_state_dict(torch.load(folder / "mine.pth", weights_only=True))
    image = F.center_crop(F.resize(decoded(photos["chelsea"]), 72), [64, 64])
    pixels = F.normalize(image / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    torch.testing.assert_close(values["map"], hooked(model, "blocks.2", pixels[None]), rtol=1e-3, atol=1e-4)
    metadata = client.get("/v2/models/mine").json()
    assert metadata["inputs"][1] == {"name": "x", "datatype": "FP32", "shape": [-1, 3, 64, 64]}
    assert client.post("/v2/models/mine/infer", **sent(photos["chelsea"])).status_code == 200
    response = client.post("/v1/extractors", json={"model": "broken", "return_nodes": ["x"]})
    refused(response, "unknown-model", "the description of model 'broken' is invalid", status=404)


def test_a_module_written_by_hand_that_takes_clips(
    clips: torch.nn.Module, tmp_path: Path, make_client: Callable[..., Client]
) -> None:
    """Any number of frames of any size, prepared as npy or raw as safetensors; values as of the module itself."""
    client = make_client(models_dir=tmp_path)
    nodes = client.get("/v1/models/clip/nodes").json()
    assert nodes["levels"]["C1"] == {"node": "stem.2", "channels": 6, "stride": 2}
    assert nodes["levels"]["C2"] == {"node": "body.1", "channels": 8, "stride": 4}
    x = torch.randn(2, 3, 10, 20, 28)
    frames = torch.randint(0, 256, (2, 10, 40, 60, 3), dtype=torch.uint8)
    preset = VideoClassification(crop_size=(32, 48), resize_size=(36, 54))
    prepared = preset(frames.permute(0, 1, 4, 2, 3))
    path = "/v1/models/clip/features?nodes=C1,C2,head"
    for options, given in ((sent(x), x), (sent({"clip": frames}), prepared)):
        values = read(client.post(path, **options))
        with torch.inference_mode():
            stem = clips.stem(given)
            for key, wanted in (("C1", stem), ("C2", clips.body(stem)), ("head", clips(given))):
                torch.testing.assert_close(values[key], wanted, rtol=1e-4, atol=1e-5)


def test_parts_take_clips_of_any_number_of_frames_and_size(
    clips: torch.nn.Module, tmp_path: Path, make_client: Callable[..., Client]
) -> None:
    client = make_client(models_dir=tmp_path)
    made = created(client, model="clip", inputs=["C1"], return_nodes=["C2", "head"])
    assert made["inputs"][0]["shape"] == [None, 6, None, None, None]
    assert made["outputs"][0]["shape"] == [None, 8, None, None, None]
    described = client.get(f"/v2/models/{made['id']}").json()
    assert [output["shape"] for output in described["outputs"]] == [[-1, 8, -1, -1, -1], [-1, 5]]
    for frames, side in ((5, 48), (9, 32)):
        clip = torch.rand(2, 3, frames, side, side)
        with torch.no_grad():
            stem, head = clips.stem(clip), clips(clip)
            maps = clips.body(stem)
        found = read(client.post(f"/v1/extractors/{made['id']}/features", **sent({"C1": stem})))
        torch.testing.assert_close(found["C2"], maps, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["head"], head, rtol=1e-4, atol=1e-5)


def test_booleans_go_over_v2(clips: torch.nn.Module, tmp_path: Path, make_client: Callable[..., Client]) -> None:
    client = make_client(models_dir=tmp_path)
    config = json.dumps({"model": "clip", "return_nodes": ["gt", "C2"]})
    client.post("/v2/repository/models/bright/load", json={"parameters": {"config": config}}).raise_for_status()
    outputs = client.get("/v2/models/bright").json()["outputs"]
    assert [(output["name"], output["datatype"]) for output in outputs] == [("gt", "BOOL"), ("C2", "FP32")]
    x = torch.randn(1, 3, 4, 12, 12)
    given = {"name": "clip", "datatype": "FP32", "shape": list(x.shape), "data": x.flatten().tolist()}
    with torch.inference_mode():
        wanted = (clips.body(clips.stem(x)) > 0.1).numpy()
    for binary in (True, False):
        asked = [{"name": "gt", "parameters": {"binary_data": binary}}]
        response = client.post("/v2/models/bright/infer", json={"inputs": [given], "outputs": asked})
        if binary:
            raw = response.content[int(response.headers["Inference-Header-Content-Length"]) :]
            found = np.frombuffer(raw, np.bool_)
        else:
            found = np.array(response.json()["outputs"][0]["data"])
        assert found.dtype == np.bool_
        assert np.array_equal(found, wanted.ravel())


NAMES = """
from torch import nn

class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.meta = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.meta(x)

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"class": nn.Conv2d(3, 3, 1), "box": nn.Conv2d(3, 4, 1)})

    def forward(self, x):
        return {name: head(x) for name, head in self.heads.items()}

class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.body(x)

    def load_state_dict(self, *args, **kwargs):
        raise KeyError("version")
"""


def test_what_is_wrong_with_one_model_costs_no_other_its_place(
    tmp_path: Path, make_client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    tables = [f'[models.{name.lower()}]\nbuilder = "own_models:{name}"' for name in ("Meta", "Heads", "Weighed")]
    safetensors.torch.save_file({"body.bias": torch.zeros(3)}, tmp_path / "w.safetensors")
    good = '[models.good]\nbuilder = "timm:create_model"\narguments = { model_name = "resnet10t", num_classes = 2 }'
    text = "\n".join([*tables, 'weights = "w.safetensors"', good])
    with own_models(tmp_path, NAMES, text), caplog.at_level(logging.ERROR, "fxserve.models"):
        client = make_client(models_dir=tmp_path, models=("meta", "heads", "weighed", "good"))
        listed = client.get("/v1/models").json()["models"]
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "model 'meta': Meta cannot be traced: no part of it can be named 'meta'" in told
    assert "model 'heads': Heads cannot be traced: no part of it can be named 'heads.class'" in told
    assert "model 'weighed': KeyError: 'version'" in told
    assert [model["name"] for model in listed] == ["good"]


def test_a_service_starts_without_a_file_that_is_wrong(
    tmp_path: Path, make_client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(models_dir=tmp_path)
    assert client.get("/healthz").status_code == 200
    assert "models.toml: No such file or directory" in caplog.text


RECOGNISER = """
[models.recogniser]
builder = "own_models:Recogniser"
preprocessing = { resize_size = 64, crop_size = 64 }
"""

MIXED = """
import torch
from torch import nn

class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.classes = nn.Conv2d(3, 6, 8, 8), nn.Linear(6, 5)

    def forward(self, x):
        steps = self.conv(x).mean(2).permute(2, 0, 1)
        times, images, channels = steps.shape
        return self.classes(steps.reshape(times * images, channels)).view(times, images, 5).permute(1, 0, 2)
"""


def test_nodes_with_rows_of_several_images_are_not_served(tmp_path: Path, make_client: Callable[..., Client]) -> None:
    images = torch.randn(2, 3, 64, 64)
    with own_models(tmp_path, MIXED, RECOGNISER) as module:
        client = make_client(models_dir=tmp_path)
        mixed = client.post("/v1/models/recogniser/features?nodes=classes", **sent(images))
        served = client.post("/v1/models/recogniser/features?nodes=permute_1", **sent(images))
    refused(mixed, "unknown-node", "'classes' has rows that cannot be assigned to one image each")
    with torch.inference_mode():
        expected = torch.cat([module.Recogniser().eval()(image[None]) for image in images])
    torch.testing.assert_close(read(served)["permute_1"], expected, rtol=1e-4, atol=1e-5)


SMALL = {"model": "squeezenet1_1", "weights": "random", "return_nodes": ["features.2"]}

BRANCHING = """
from torch import nn

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 8, 8)

    def forward(self, x):
        maps = self.conv(x)
        if maps.mean() > 0:
            maps = maps * 2
        return maps
"""


def test_models_that_cannot_be_traced_say_why(
    tmp_path: Path, make_client: Callable[..., Client], photos: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with own_models(tmp_path, BRANCHING, '[models.branching]\nbuilder = "own_models:Branching"\n'):
        client = make_client(models_dir=tmp_path)
        in_v1 = (
            client.get("/v1/models/branching/nodes"),
            client.post("/v1/extractors", json={"model": "branching", "return_nodes": ["conv"]}),
            client.post("/v1/models/branching/features?nodes=conv", **sent(photos["chelsea"])),
        )
        in_v2 = [client.get(f"/v2/models/branching{rest}") for rest in ("", "/ready")]
        client.post("/v1/extractors?wait=60", json={**SMALL, "name": "branching"})
        named = client.get("/v2/models/branching/ready")
        hidden = make_client(models_dir=tmp_path, models=["resnet18"]).get("/v1/models/branching/nodes")
    assert "model 'branching': Branching cannot be traced: `if maps.mean() > 0:`" in caplog.text
    for response in in_v1:
        problem = refused(response, "not-traceable", "torch.where")
        assert problem["module"] == "Branching"
        assert problem["source"].endswith("if maps.mean() > 0:")
    for response in in_v2:
        assert response.status_code == 400
        assert "if maps.mean() > 0:" in response.json()["error"]
    assert named.json()["ready"]
    assert (hidden.status_code, "source" in hidden.json()) == (404, False)


UNUSUAL = """
from torch import nn

class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 8, 8)

    def forward(self, x):
        maps = self.conv(x)
        return maps.to_sparse(), maps.narrow(1, 0, 0)
"""


UNUSUAL_ENTRY = """
[models.unusual]
builder = "own_models:Unusual"
preprocessing = { resize_size = 64, crop_size = 64 }
"""


def test_values_that_are_sparse_or_have_no_elements(
    tmp_path: Path, make_client: Callable[..., Client], photos: dict[str, bytes]
) -> None:
    image = sent(photos["chelsea"])
    with own_models(tmp_path, UNUSUAL, UNUSUAL_ENTRY):
        client = make_client(models_dir=tmp_path)
        nodes = {node["name"]: node for node in client.get("/v1/models/unusual/graph").json()["nodes"]}
        sparse = client.post("/v1/models/unusual/features?nodes=to_sparse", **image)
        empty = client.post("/v1/models/unusual/features?nodes=narrow", **image).json()["outputs"][0]
        projected = client.post("/v1/models/unusual/features?nodes=narrow&project=3", **image)
    assert (nodes["to_sparse"]["extractable"], nodes["to_sparse"]["bytes"]) == (False, None)
    refused(sparse, "unknown-node", "'to_sparse' is not a tensor with a row per image")
    assert (empty["shape"], empty["data"]) == ([1, 0, 8, 8], [])
    refused(projected, "bad-tensor", "project=3 needs rows with values")
