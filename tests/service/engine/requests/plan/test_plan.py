"""What is known of images from their headers, and how they are shared out to decoders."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torchvision

from fxcore.errors import BadImage, BadTensor, ImageTooLarge
from service.engine.requests.plan.images import plan_images
from service.engine.requests.plan.limits import check_sizes
from service.engine.requests.plan.plan import Inputs, Plan
from service.engine.requests.plan.tensors import plan_tensors
from service.engine.runtime.runtime import Runtime
from tests.hostile_images import deep_png
from tests.service.engine.running import encoded, runtime_alone

LIMIT = 1_000_000


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return runtime_alone()


def plan(runtime: Runtime, sent: Inputs, preprocess: str, max_pixels: int) -> Plan:
    description = runtime.description
    if isinstance(sent, Mapping):
        made = plan_tensors(description, sent, preprocess, max_pixels)
    else:
        with ThreadPoolExecutor(1) as intake:
            made = asyncio.run(plan_images(description, sent, preprocess, max_pixels, intake))
    check_sizes(description, made, max_pixels)
    return made


def decoded(runtime: Runtime, images: Sequence[bytes], preprocess: str = "default") -> torch.Tensor:
    made = plan(runtime, images, preprocess, LIMIT)
    parts = [part.decode() for part in made.parts[::-1]][::-1]  # in any order
    assert [row for part in made.parts for row in part.rows] == list(range(len(images)))
    assert [len(part) for (part,) in parts] == [len(part.rows) for part in made.parts]
    return runtime.description.decoder.batch(torch.cat([part for (part,) in parts]))


@pytest.mark.parametrize("count", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("preprocess", ["default", "fast"])
def test_rows_come_in_order(runtime: Runtime, arrays: dict[str, np.ndarray], count: int, preprocess: str) -> None:
    images = [encoded(np.roll(arrays["chelsea"], 7 * i, axis=1)) for i in range(count)]
    rows = decoded(runtime, images, preprocess)
    assert rows.shape == (count, 3, 224, 224)
    for image, row in zip(images, rows, strict=True):
        assert torch.equal(row, decoded(runtime, [image], preprocess)[0])


@pytest.mark.parametrize("color", [0, 2, 4, 6])
def test_unprocessed_files_of_16_bits_keep_them_all(runtime: Runtime, color: int) -> None:
    data = deep_png(color)
    expected = torchvision.io.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), "RGB")
    assert expected.dtype == torch.uint16
    assert torch.equal(decoded(runtime, [data], "none")[0], expected.float() / 65535)


def test_pixels_count_as_bytes_until_their_batch_is_made(runtime: Runtime, jpegs: list[bytes]) -> None:
    ways = [plan(runtime, jpegs, way, LIMIT) for way in ("default", "pil", "fast")]
    assert [made.decoded for made in ways] == [len(jpegs) * 3 * 224 * 224] * 3
    assert all(made.shapes == {((3, 224, 224),): len(jpegs)} for made in ways)


@pytest.mark.parametrize("shape", [(2, 40_000), (40_000, 2)])
def test_a_thin_image_cannot_grow_without_bounds(runtime: Runtime, shape: tuple[int, int]) -> None:
    """Resized to 256 pixels on its shorter side it would take 4 GB."""
    pixels = np.zeros((*shape, 3), dtype=np.uint8)
    with pytest.raises(ImageTooLarge, match="resizing") as caught:
        plan(runtime, [encoded(pixels[:2, :2]), encoded(pixels)], "default", LIMIT)
    assert caught.value.extra["index"] == 1
    with pytest.raises(ImageTooLarge, match="resizing"):
        plan(runtime, {"x": torch.from_numpy(pixels[None])}, "default", LIMIT)
    assert decoded(runtime, [encoded(pixels)], "none").shape == (1, 3, *shape)


def test_the_images_of_each_input_are_limited(runtime: Runtime) -> None:
    (x,) = runtime.description.inputs
    pair = replace(runtime.description, inputs=(x, replace(x, name="y")))
    thin, usual = (torch.zeros(1, *size, 3, dtype=torch.uint8) for size in ((2, 40_000), (40, 40)))
    for given in ({"x": thin, "y": usual}, {"x": usual, "y": thin}):
        with pytest.raises(ImageTooLarge, match="resizing") as caught:
            check_sizes(pair, plan_tensors(pair, given, "default", LIMIT), LIMIT)
        assert caught.value.extra["index"] == 0


@pytest.mark.exhaustive
def test_an_image_of_which_a_detector_leaves_nothing_is_refused() -> None:
    """torchvision's detector limits the longer side, and rounds the shorter one to none."""
    detector = runtime_alone("fasterrcnn_mobilenet_v3_large_320_fpn", ("C4",))
    narrow, usual = (encoded(np.zeros((*size, 3), dtype=np.uint8)) for size in ((2, 3000), (40, 60)))
    with pytest.raises(BadImage, match="640 x 0 after resizing") as caught:
        plan(detector, [usual, narrow], "default", LIMIT)
    assert caught.value.extra["index"] == 1


@pytest.mark.parametrize(
    "model", ["resnet18", pytest.param("ssdlite320_mobilenet_v3_large", marks=pytest.mark.exhaustive)]
)
def test_what_a_model_resizes_images_to_is_not_bounded_by_their_largest_size(model: str) -> None:
    small = runtime_alone(model, ("C4",))
    for shape, preprocess in product([(100, 100), (50, 200), (200, 50)], ["default", "fast", "none"]):
        pixels = np.zeros((*shape, 3), dtype=np.uint8)
        for sent in ([encoded(pixels)], {small.description.inputs[0].name: torch.from_numpy(pixels[None])}):
            assert plan(small, sent, preprocess, 100 * 100).shapes.total() == 1
            with pytest.raises(ImageTooLarge) as caught:
                plan(small, sent, preprocess, 100 * 100 - 1)
            assert (caught.value.extra["pixels"], caught.value.extra["limit"]) == (100 * 100, 100 * 100 - 1)


@pytest.mark.parametrize("preprocess", ["default", "fast", "none"])
@pytest.mark.parametrize(
    "array",
    [
        torch.zeros(1, 0, 100, 3, dtype=torch.uint8),
        torch.zeros(1, 100, 0, 3, dtype=torch.uint8),
        torch.zeros(1, 2**31 - 1, 0, 3, dtype=torch.uint8),
        torch.zeros(1, 3, 0, 100),
        torch.zeros(1, 3, 100, 0),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_images_without_pixels_are_refused(runtime: Runtime, array: torch.Tensor, preprocess: str) -> None:
    with pytest.raises(BadTensor, match="at least 1"):
        plan(runtime, {"x": array}, preprocess, LIMIT)


def test_clips_without_frames_or_pixels_are_refused() -> None:
    clips = runtime_alone("r3d_18", ("stem",))
    for array in (
        torch.zeros(1, 2, 0, 112, 3, dtype=torch.uint8),
        torch.zeros(1, 0, 112, 112, 3, dtype=torch.uint8),
        torch.zeros(1, 3, 0, 112, 112),
    ):
        with pytest.raises(BadTensor, match="at least 1"):
            plan(clips, {"x": array}, "default", LIMIT)


def test_the_index_of_a_damaged_image_is_reported(runtime: Runtime, jpegs: list[bytes]) -> None:
    images = [jpegs[i % 3] for i in range(40)]
    images[21] = images[21][:-500]
    made = plan(runtime, images, "default", LIMIT)
    with pytest.raises(BadImage) as caught:
        _ = [part.decode() for part in made.parts]
    assert caught.value.extra["index"] == 21


def test_a_million_rows_are_not_planned_one_by_one(runtime: Runtime) -> None:
    """The event loop plans them."""
    made = plan(runtime, {"x": torch.zeros(1, 1, 1, 3, dtype=torch.uint8).expand(2**20, 1, 1, 3)}, "default", LIMIT)
    assert made.shapes == {((3, 224, 224),): 2**20}
    assert made.sent == {(1, 1): 0}
    assert len(made.parts) == 16


def test_rows_are_limited_whatever_their_size(runtime: Runtime) -> None:
    with pytest.raises(BadTensor, match="has 1048577 rows; send at most 1048576 at a time"):
        plan(runtime, {"x": torch.zeros(2**20 + 1, 1, 1, 3, dtype=torch.uint8)}, "default", LIMIT)
