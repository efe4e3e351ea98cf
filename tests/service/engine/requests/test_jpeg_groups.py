"""JPEG files of a request that are decoded together: which they are, and that nothing else changes by it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fxcore.errors import BadImage, ImageTooLarge
from fxcore.images.nvjpeg import JpegBatches
from service.engine import Engine, FeatureOptions
from service.engine.record import ExtractorRecord
from service.engine.requests.jpeg_groups import FEWEST, MOST, MOST_PIXELS, groups
from service.engine.requests.planning import plan
from tests.service.engine.running import MakeEngine, built, encoded, record_alone

CPU = torch.device("cpu")
LIMIT = 1_000_000
FAST = FeatureOptions(preprocess="fast")
ROW = (224, 224)


@pytest.fixture(scope="module")
def built_record() -> ExtractorRecord:
    return record_alone()


@pytest.fixture
def record(built_record: ExtractorRecord) -> Iterator[ExtractorRecord]:
    """It decodes as on CUDA, but for the device."""
    built_record.jpeg_batches = JpegBatches(built_record.decoder, CPU)
    yield built_record
    del built_record.jpeg_batches


def ranges(*stops: int) -> list[range]:
    return [range(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]


@pytest.mark.parametrize(
    ("rows", "pixels", "stops"),
    [
        ([ROW] * FEWEST, 9, [FEWEST]),
        ([ROW] * (FEWEST - 1), 9, range(1, FEWEST)),
        ([ROW] * (2 * MOST + FEWEST), 9, [MOST, 2 * MOST, 2 * MOST + FEWEST]),
        ([ROW] * (MOST + 1), 9, [MOST, MOST + 1]),
        ([None] + [ROW] * 5 + [None, None] + [ROW] * 4, 9, [1, 6, 7, 8, 12]),
        ([ROW] * 4 + [(520, 700)] * 5 + [(520, 701)], 9, [4, 9, 10]),
        ([None] * FEWEST, 9, range(1, FEWEST + 1)),
        ([ROW] * 8, MOST_PIXELS // 5, [5, 6, 7, 8]),
        ([ROW] * 12, MOST_PIXELS // 4, [4, 8, 12]),
        ([ROW] * 12, MOST_PIXELS // 4 + 1, range(1, 13)),
        ([ROW] * 12, MOST_PIXELS // 8, [8, 12]),
    ],
)
def test_groups(rows: list[tuple[int, int] | None], pixels: int, stops: list[int]) -> None:
    assert groups(rows, [pixels] * len(rows)) == ranges(*stops)


def test_a_large_image_among_small_ones_is_decoded_alone() -> None:
    pixels = [9] * 4 + [MOST_PIXELS // FEWEST + 1] + [9] * 5
    assert groups([ROW] * 10, pixels) == ranges(4, 5, 10)


def rows_of(record: ExtractorRecord, images: list[bytes], preprocess: str = "fast") -> tuple[list[range], Tensor]:
    made = plan(record, images, preprocess, LIMIT)
    parts = [decode() for _, decode in made.parts[::-1]][::-1]  # in any order
    assert [len(part) for (part,) in parts] == [len(rows) for rows, _ in made.parts]
    return [rows for rows, _ in made.parts], torch.cat([part for (part,) in parts])


@pytest.fixture(scope="module")
def mixed(arrays: dict[str, np.ndarray]) -> list[bytes]:
    """Each another picture: 5 JPEG files, a PNG, 3 JPEG files, a PNG, and 7 JPEG files, the last in grey."""
    pictures = [np.roll(arrays["chelsea"][: 200 + 5 * i], 40 * i, axis=1) for i in range(17)]
    files = [encoded(picture, "PNG" if i in (5, 9) else "JPEG") for i, picture in enumerate(pictures)]
    files[16] = encoded(pictures[16][..., 0])
    return files


def test_rows_come_in_order_where_formats_alternate(record: ExtractorRecord, mixed: list[bytes]) -> None:
    parts, rows = rows_of(record, mixed)
    assert parts == ranges(5, 6, 7, 8, 9, 10, 17)
    assert rows.dtype == torch.uint8
    alone = torch.stack([record.decoder.image(data) for data in mixed])
    difference = (rows.float() - alone).abs()
    assert difference.max() <= 2
    assert (difference > 1).float().mean() < 2e-4


@pytest.mark.parametrize("preprocess", ["default", "none"])
def test_only_fast_images_are_decoded_together(record: ExtractorRecord, jpegs: list[bytes], preprocess: str) -> None:
    made = plan(record, jpegs * 2, preprocess, LIMIT)
    assert [rows for rows, _ in made.parts] == ranges(1, 2, 3, 4, 5, 6)


def test_on_a_cpu_each_is_decoded_by_itself(built_record: ExtractorRecord, mixed: list[bytes]) -> None:
    assert built_record.jpeg_batches is None
    parts, rows = rows_of(built_record, mixed)
    assert parts == ranges(*range(1, 18))
    assert torch.equal(rows, torch.stack([built_record.decoder.image(data) for data in mixed]))


def test_what_it_takes_is_claimed(record: ExtractorRecord, jpegs: list[bytes]) -> None:
    pixels = [300 * 451, 400 * 600, 427 * 640]
    together, rows = plan(record, jpegs * 2, "fast", LIMIT), 6 * 3 * 224 * 224
    assert together.held(1) == rows + 2 * 3 * sum(pixels) + 24 * max(pixels)
    alone = plan(record, jpegs, "fast", LIMIT)
    assert alone.rows == rows // 2
    assert alone.held(1) - alone.rows == max(alone.costs) > 3 * max(pixels)


def broken(file: bytes) -> bytes:
    """A JPEG whose header and end are whole, but not the table that its pixels are read by."""
    table = file.index(b"\xff\xc4") + 5
    return file[:table] + b"\xff" * 16 + file[table + 16 :]


def test_a_broken_file_is_reported_by_index(record: ExtractorRecord, jpegs: list[bytes]) -> None:
    images = jpegs * 4
    images[7] = broken(images[7])
    made = plan(record, images, "fast", LIMIT)
    assert [rows for rows, _ in made.parts] == ranges(12)
    with pytest.raises(BadImage, match="image 7: ") as caught:
        made.parts[0][1]()
    assert caught.value.extra["index"] == 7


def test_a_file_cut_short_is_refused(record: ExtractorRecord, jpegs: list[bytes]) -> None:
    images = jpegs * 4
    images[5] = images[5][: len(images[5]) // 2]
    made = plan(record, images, "fast", LIMIT)
    assert [rows for rows, _ in made.parts] == ranges(5, 6, 12)
    with pytest.raises(BadImage, match="image 5: "):
        made.parts[1][1]()


def test_an_oversized_image_is_reported_before_any_is_decoded(record: ExtractorRecord, jpegs: list[bytes]) -> None:
    with pytest.raises(ImageTooLarge, match="image 2: "):
        plan(record, jpegs * 2, "fast", 427 * 640 - 1)


def test_a_failing_device_decoder_falls_back_to_the_cpu(record: ExtractorRecord, mixed: list[bytes]) -> None:
    """It has no decoder, no memory, or is not there at all."""
    record.jpeg_batches = JpegBatches(record.decoder, torch.device("cuda:99"))
    parts, rows = rows_of(record, mixed)
    assert parts == ranges(5, 6, 7, 8, 9, 10, 17)
    assert torch.equal(rows, torch.stack([record.decoder.image(data) for data in mixed]))


@pytest.mark.anyio
async def test_features_of_files_decoded_together(engine: MakeEngine, mixed: list[bytes]) -> None:
    async with engine() as running:
        made = await built(running)
        made.jpeg_batches = JpegBatches(made.decoder, CPU)
        await check_features(running, made, mixed)


@pytest.mark.anyio
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
async def test_features_of_files_decoded_by_nvjpeg(engine: MakeEngine, mixed: list[bytes]) -> None:
    async with engine(device="cuda") as running:
        made = await built(running)
        assert made.jpeg_batches is not None
        assert made.jpeg_batches.rows(mixed[:5]).is_cuda
        await check_features(running, made, mixed)


async def check_features(running: Engine, record: ExtractorRecord, images: list[bytes]) -> None:
    """Of several requests at a time, close to those of the exact way, each image's own; an error is the file's own."""
    exact = await running.features(record, images)
    for fast in await asyncio.gather(*(running.features(record, images, FAST) for _ in range(4))):
        for key, expected in exact.outputs.items():
            near = torch.cosine_similarity(fast.outputs[key].flatten(1)[:, None], expected.flatten(1)[None], dim=2)
            assert near.diagonal().min() > 0.995
            assert torch.equal(near.argmax(dim=1), torch.arange(len(images)))
    with pytest.raises(BadImage, match="image 12: "):
        await running.features(record, [*images[:12], images[12][:-500], *images[13:]], FAST)
