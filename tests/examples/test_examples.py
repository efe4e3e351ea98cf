"""Each example runs as it stands and finds what it looks for; those whose weights are a download, on random ones."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision
from captum.attr import LayerGradCam
from numpy.typing import NDArray
from safetensors.numpy import load_file

from fxcore import get_model, load_model
from service.engine import FeatureOptions
from service.offline import Job, extract
from service.schemas.specs import ExtractorSpec
from service.settings import Settings
from tests.decoding import decoded
from tests.e2e.conftest import Server, start  # noqa: F401
from tests.e2e.forked import Forked

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RANDOM = ("--weights", "random")


@pytest.fixture(scope="module")
def url(start: Callable[..., Server]) -> str:  # noqa: F811
    """One server for all of them."""
    return start().url


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """What an example prints: ``run(name, *arguments)``."""

    def printed(name: str, *arguments: Any) -> str:
        out, errors = tmp_path / "stdout", tmp_path / "stderr"
        done = Forked([str(HERE / f"{name}.py"), *map(str, arguments)], _environment(), out, errors)
        assert done.wait(900) == 0, errors.read_text()
        return out.read_text()

    return printed


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.exhaustive
def test_search_finds_the_photograph_that_a_piece_is_of(
    url: str, photos: dict[str, bytes], tmp_path: Path, run: Callable[..., str]
) -> None:
    (tmp_path / "photos").mkdir()
    for name, data in photos.items():
        (tmp_path / f"photos/{name}.jpg").write_bytes(data)
    piece = PIL.Image.open(io.BytesIO(photos["coffee"])).transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    piece.crop((30, 20, 560, 380)).convert("L").save(tmp_path / "piece.png")
    lines = run("search", tmp_path / "piece.png", tmp_path / "photos", "--server", url)
    found = [Path(line.split("  ")[1]).stem for line in lines.splitlines()]
    assert found[0] == "coffee"
    assert sorted(found) == sorted(photos)


@pytest.mark.exhaustive
def test_the_frechet_distance_is_that_of_the_features(
    photos: dict[str, bytes], tmp_path: Path, run: Callable[..., str]
) -> None:
    """torch-fidelity's formula, with SciPy's square root of a matrix, over the features that a run writes."""
    linalg = pytest.importorskip("scipy.linalg")
    features = []
    for name in ("coffee", "rocket"):
        photo = PIL.Image.open(io.BytesIO(photos[name])).convert("RGB")
        (tmp_path / name).mkdir()
        for number in range(100):  # more than the node has channels
            left, top = 17 * (number % 20), 23 * (number // 20)
            photo.crop((left, top, left + 64, top + 64)).save(tmp_path / name / f"{number}.png")
        options = FeatureOptions(pool="avg")
        spec = ExtractorSpec(model="squeezenet1_1", weights="random", return_nodes=["features.0"])
        job = Job((str(tmp_path / name),), tmp_path / f"{name}-rows", "safetensors", spec, options)
        settings = Settings(device="cpu", lowering=False)
        extract(job, settings)
        extract(replace(job, out=tmp_path / f"{name}-statistics", reduce="mean,cov"), settings)
        features.append(load_file(tmp_path / f"{name}-rows" / "shard-000000.safetensors")["features.0"].astype(float))
    means = [rows.mean(axis=0) for rows in features]
    covariances = [np.cov(rows, rowvar=False) for rows in features]
    root = linalg.sqrtm(covariances[0] @ covariances[1])
    difference = means[0] - means[1]
    right = difference @ difference + np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * np.trace(root.real)
    said = run("fid", tmp_path / "coffee-statistics", tmp_path / "rocket-statistics", "--node", "features.0")
    assert float(said) == pytest.approx(right, rel=1e-4)


@pytest.mark.exhaustive
def test_a_probe_reads_digits(url: str, run: Callable[..., str]) -> None:
    said = run("probe", "--server", url, "--digits", 900)
    match = re.match(r"accuracy (\d\.\d+) on 270 digits, efficientnet_lite0 C4", said)
    assert match is not None, said
    assert float(match[1]) > 0.9


@pytest.mark.exhaustive
def test_a_head_finds_patches(url: str, run: Callable[..., str]) -> None:
    model = "fasterrcnn_mobilenet_v3_large_320_fpn"
    said = run("detection_head", "--server", url, "--model", model, "--level", "P5", "--pictures", 200, *RANDOM)
    match = re.match(r"(\d\.\d+) of 50 patches found within a cell of 32 pixels; size off by (\d+) pixels", said)
    assert match is not None, said
    assert float(match[1]) >= 0.5  # trained for seconds, and processors differ; by chance a few hundredths
    assert float(match[2]) < 16


@pytest.mark.exhaustive
def test_attention_becomes_a_picture(
    url: str, photos: dict[str, bytes], tmp_path: Path, run: Callable[..., str]
) -> None:
    (tmp_path / "cat.jpg").write_bytes(photos["chelsea"])
    files = tmp_path / "cat.jpg", tmp_path / "heads.png"
    said = run("attention", *files, "--server", url, "--model", "vit_b_32", *RANDOM)
    assert "12 heads of encoder.layers.encoder_layer_0.self_attention.attention, 7 x 7 patches each" in said
    picture = np.asarray(PIL.Image.open(tmp_path / "heads.png"))
    assert picture.shape == (7 * 16, 12 * 7 * 16)
    heads = picture[8::16, 8::16].reshape(7, 12, 7).swapaxes(0, 1).astype(float)
    wanted = attention_of_the_class_token(photos["chelsea"]).reshape(12, 7, 7)
    assert np.abs(heads - 255 * wanted / wanted.max((1, 2), keepdims=True)).max() <= 1.01
    assert heads.std() > 5


def attention_of_the_class_token(photo: bytes) -> NDArray[np.float32]:
    """What torch's own module says that each head of the first layer looks at, ``[heads, patches]``."""
    torch.manual_seed(0)
    model = torchvision.models.vit_b_32(weights=None).eval()
    seen: list[torch.Tensor] = []
    attention = model.encoder.layers[0].self_attention
    attention.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    batch = torchvision.models.ViT_B_32_Weights.DEFAULT.transforms()(decoded(photo))[None]
    with torch.inference_mode():
        model(batch)
        _, weights = attention(seen[0], seen[0], seen[0], need_weights=True, average_attn_weights=False)
    return np.asarray(weights[0, :, 0, 1:])


@pytest.mark.exhaustive
def test_a_head_in_onnxruntime_ends_what_the_server_began(
    url: str, photos: dict[str, bytes], tmp_path: Path, run: Callable[..., str]
) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "cat.jpg").write_bytes(photos["chelsea"])
    said = run("split_network", tmp_path / "cat.jpg", "--server", url, "--model", "resnet18", "--at", "layer3", *RANDOM)
    match = re.match(r"class (\d+) by the head here, class (\d+) by the server; apart by (\S+)", said)
    assert match is not None, said
    assert match[1] == match[2]
    assert float(match[3]) < 1e-3


@pytest.mark.exhaustive
def test_evidence_for_the_second_class_is_found(
    url: str, photos: dict[str, bytes], tmp_path: Path, run: Callable[..., str]
) -> None:
    (tmp_path / "cat.jpg").write_bytes(photos["chelsea"])
    said = run("second_best", tmp_path / "cat.jpg", tmp_path / "cams.png", "--server", url)
    entry = get_model("efficientnet_lite0")
    model = load_model(entry, entry.canonical_weights("DEFAULT"))
    batch = entry.preprocessing().image(PIL.Image.open(tmp_path / "cat.jpg"))[None]
    best = model(batch)[0].argsort(descending=True)[:2].tolist()
    lines = []
    for place, index in zip(("first", "second"), best, strict=True):
        cam = LayerGradCam(model, model.features[7]).attribute(batch, index, relu_attributions=True)[0, 0]
        row, column = divmod(int(cam.argmax()), 7)
        lines.append(f"{place}: class {index}, strongest at row {row}, column {column} of 7 x 7")
    assert said.splitlines() == lines
    assert set(best) <= {281, 282, 285}  # tabby, tiger cat, Egyptian cat
    with PIL.Image.open(tmp_path / "cams.png") as picture:
        assert picture.size == (448, 224)


@pytest.mark.exhaustive
def test_channels_are_ranked_by_what_a_prediction_loses(
    url: str, photos: dict[str, bytes], tmp_path: Path, run: Callable[..., str]
) -> None:
    (tmp_path / "cat.jpg").write_bytes(photos["chelsea"])
    named = "--model", "resnet18", "--at", "layer1", "--result", "fc", *RANDOM
    first, *lines = run("ablate", tmp_path / "cat.jpg", "--server", url, *named).splitlines()
    model = load_model(get_model("resnet18"), "random")
    batch = torchvision.models.ResNet18_Weights.DEFAULT.transforms()(decoded(photos["chelsea"]))[None]
    with torch.no_grad():
        scores = model(batch)[0]
        predicted = int(scores.argmax())
        each_off = 1 - torch.eye(64)[:, :, None, None]
        model.layer1.register_forward_hook(lambda module, inputs, output: output * each_off)
        lost = scores[predicted] - model(batch.expand(64, -1, -1, -1))[:, predicted]
    assert first.startswith(f"class {predicted} has ")
    assert float(first.split()[-1]) == pytest.approx(scores[predicted].item(), abs=1e-3)
    found = {int(line.split()[-1]): float(line.split()[0]) for line in lines}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert list(found.values()) == pytest.approx(lost.sort(descending=True).values[:10].tolist(), abs=2e-4)
    assert [lost[channel].item() for channel in found] == pytest.approx(list(found.values()), abs=2e-4)
