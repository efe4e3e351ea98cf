"""Packaged models against the package that their weights were made for."""

import numpy as np
import PIL.Image
import pytest
import torch
from efficientnet_lite_pytorch import EfficientNet
from torchvision.transforms import functional as F

from fxcore import create_extractor, get_model, list_models, photos
from fxcore.errors import WeightsUnavailable
from fxcore.images.decoding import Decoder
from fxcore.models import packaged_models
from fxcore.models.catalog import source_of

TOP = {"chelsea": "Egyptian cat", "coffee": "espresso"}


@pytest.fixture(scope="module")
def entry():
    return get_model("efficientnet_lite0")


@pytest.fixture(scope="module")
def reference(entry):
    file = entry.weights_info("DEFAULT").file
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(file)).eval()


def prepared(photo):
    """224 of 256, bicubic, mean 127 and standard deviation 128 of 255, by torchvision's own functions."""
    image = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
    image = F.center_crop(F.resize(image, 256, F.InterpolationMode.BICUBIC, antialias=True), 224)
    return ((image.float() - 127) / 128)[None]


@pytest.mark.parametrize("file", photos.files(), ids=lambda file: file.stem)
@torch.inference_mode()
def test_logits_are_those_of_the_package(entry, reference, file):
    model = entry.load_published("IMAGENET1K")
    x = prepared(PIL.Image.open(file).convert("RGB"))
    decoder = Decoder(entry.preprocessing())
    assert (decoder.batch(decoder.image(file.read_bytes(), None, "default")[None]) - x).abs().max() < 1e-5
    expected = reference(x)
    got = model(x)
    assert (got - expected).abs().max() <= 1e-4
    names = entry.weights_info("DEFAULT").categories
    assert torch.equal(got.topk(5).indices, expected.topk(5).indices)
    if file.stem in TOP:
        assert names[int(got.argmax())] == TOP[file.stem]


@torch.inference_mode()
def test_inner_features_are_those_of_the_package(entry, reference):
    x = prepared(PIL.Image.open(photos.files()[0]).convert("RGB"))
    extractor = create_extractor(entry.load_published("IMAGENET1K"), ["features.8", "features.4.0"], x)
    got = extractor(x)
    assert (got["features.8"] - reference.extract_features(x)).abs().max() <= 1e-4
    blocks = []
    handle = reference._blocks[5].register_forward_hook(lambda module, args, out: blocks.append(out))
    reference(x)
    handle.remove()
    assert (got["features.4.0"] - blocks[0]).abs().max() <= 1e-4


def test_it_is_in_the_catalog_with_levels(entry):
    from fxcore.graph.model_graph import model_graph

    assert source_of(entry) == "packaged"
    assert entry in list_models()
    assert entry in list_models("packaged")
    assert entry not in list_models("torchvision")
    levels = model_graph("efficientnet_lite0").levels
    assert {name: level.stride for name, level in levels.items()} == {f"C{n}": 2**n for n in range(1, 6)}


def test_a_file_of_something_else_is_refused(entry, tmp_path, monkeypatch):
    file = tmp_path / "other.pth"
    torch.save({"weight": torch.zeros(1)}, file)
    monkeypatch.setattr(packaged_models, "_weights_file", lambda name: file)
    other = packaged_models.packaged_models.__wrapped__()["efficientnet_lite0"]
    with pytest.raises(WeightsUnavailable, match=r"other\.pth does not belong to efficientnet_lite0"):
        other.load_published("IMAGENET1K")
