"""Trained features mean something: what looks alike is near, what differs is told apart, in int8 as well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import skimage.data
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from fxcore import Extractor, build_extractor, get_model, load_model, model_graph, photos
from fxcore.backends import BACKENDS, Options
from fxcore.backends.processor import adds_int8_products_exactly
from fxcore.photos import augmented, calibration_rows, input_rows

NAME = "efficientnet_lite0"

MIN_COSINE = 0.98
"""The service refuses what is further from float32."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load_model(get_model(NAME), "DEFAULT")


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
    images = torch.cat([four, rows(augmented(photos.photos(), 40))])
    expected, got = (module(images)["classifier"] for module in (extractor.module, int8))
    assert backend == "eager" or torch.cosine_similarity(expected, got)[: len(four)].min() > MIN_COSINE
    if backend == "openvino" and adds_int8_products_exactly():
        assert torch.equal(got.argmax(1), expected.argmax(1))
    likely = expected.softmax(1).topk(2).values
    clear = likely[:, 0] - likely[:, 1] > 0.3
    assert clear.sum() >= 5
    assert torch.equal(got.argmax(1)[clear], expected.argmax(1)[clear])
    assert torch.cosine_similarity(expected, got).min() > 0.9
