"""timm's preprocessing over a socket, against timm's own transform and model."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import PIL.Image
import pytest
import timm
import torch

from tests.e2e.conftest import Server
from tests.hostile_images import saved
from tests.seeded import seeded
from tests.wire import SAFETENSORS, multipart, read

# Architectures of a package that registers them with timm: one small network at several configurations.
REGISTERED = """
import timm
from timm.models import generate_default_cfgs, register_model

CONFIGS = {
    "pp_centre": {"crop_pct": 0.875, "interpolation": "bilinear", "crop_mode": "center"},
    "pp_whole": {"crop_pct": 1.0, "interpolation": "bicubic", "crop_mode": "center"},
    "pp_wide": {"crop_pct": 0.95, "interpolation": "bicubic", "crop_mode": "center", "input_size": (3, 32, 48)},
    "pp_squash": {"crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "squash"},
    "pp_border": {"crop_pct": 0.95, "interpolation": "bicubic", "crop_mode": "border", "mean": (0.5, 0.25, 0.75)},
}
shared = {"input_size": (3, 40, 40), "first_conv": "conv1", "classifier": "fc", "num_classes": 10}
default_cfgs = generate_default_cfgs({name: {**shared, **config} for name, config in CONFIGS.items()})


def register(name):
    def build(pretrained=False, **options):
        return timm.create_model("test_resnet", **{**options, "pretrained_cfg": timm.get_pretrained_cfg(name)})

    build.__name__, build.__module__ = name, __name__
    register_model(build)


for name in CONFIGS:
    register(name)


def builder():
    return timm.create_model("pp_centre")
"""
NAMES = ("pp_centre", "pp_whole", "pp_wide", "pp_squash", "pp_border")


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Registers them here; the folder also has a models.toml through which a server registers them."""
    folder = tmp_path_factory.mktemp("registered")
    (folder / "registered_for_tests.py").write_text(REGISTERED)
    (folder / "models.toml").write_text('[models.any]\nbuilder = "registered_for_tests:builder"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        importlib.import_module("registered_for_tests")
        yield folder
    del sys.modules["registered_for_tests"]


@pytest.mark.exhaustive
def test_every_crop_mode_is_timms_to_the_bit(
    registered: Path, start: Callable[..., Server], photos: dict[str, bytes]
) -> None:
    server = start(models_dir=registered)
    wide = PIL.Image.open(io.BytesIO(photos["chelsea"]))
    images = [wide, wide.transpose(PIL.Image.Transpose.ROTATE_90), wide.resize((30, 20)), wide.convert("L")]
    form = multipart(saved(image, "PNG") for image in images)
    for name in NAMES:
        model = seeded(timm.create_model, name)
        config = timm.data.resolve_model_data_config(model)
        transform = timm.data.create_transform(**config, is_training=False)
        x = torch.stack([transform(image.convert("RGB")) for image in images])
        url = f"/v1/models/timm.{name}/features?nodes=x,layer4:last&weights=random&preprocess=pil"
        found = read(server.http.post(url, headers={"Accept": SAFETENSORS}, **form))
        assert torch.equal(found["x"], x), name
        with torch.no_grad():
            last = model.forward_features(x)
        assert torch.allclose(found["last"], last, rtol=1e-4, atol=1e-5 * float(last.abs().max())), name
        described = server.http.get(f"/v1/models/timm.{name}").json()["preprocessing"]
        assert (described["crop_mode"], described["crop_pct"]) == (config["crop_mode"], config["crop_pct"])
