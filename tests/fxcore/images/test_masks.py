"""Masks: PNG files, COCO's run lengths, and areas held to averages over cells by torch."""

import itertools
import time
import zlib

import numpy as np
import PIL.Image
import pytest
import torch
from torch.nn.functional import interpolate

from fxcore.errors import BadMask
from fxcore.images.masks import Rle, read_mask, shares
from fxcore.images.placement import Placement
from fxcore.pooling import MapGrid
from tests import hostile_images
from tests.hostile_images import saved

MASK = np.random.default_rng(0).random((12, 18)) < 0.4


def counts(mask):
    """Run lengths down the columns, as COCO's maskApi.c writes them."""
    runs = [(value, len(list(run))) for value, run in itertools.groupby(mask.T.ravel().tolist())]
    return [*([0] if runs[0][0] else []), *(length for _, length in runs)]


def compressed(numbers):
    """rleToString of COCO's maskApi.c."""
    text = ""
    for place, number in enumerate(numbers):
        x = number - numbers[place - 2] if place > 2 else number
        more = True
        while more:
            c = x & 0x1F
            x >>= 5
            more = x != -1 if c & 0x10 else x != 0
            text += chr((c | 0x20 if more else c) + 48)
    return text


@pytest.mark.parametrize("mask", [MASK, ~MASK, np.ones((3, 5), bool), np.eye(2000, 7, dtype=bool)])
def test_run_lengths(mask):
    numbers = counts(mask)
    for written in (numbers, compressed(numbers)):
        assert np.array_equal(read_mask(Rle(*mask.shape, written), mask.shape), mask)


def test_the_example_of_coco():
    """The format's own: 2 x 3 of [0 1 0; 1 1 0] is [1, 3, 2], which has no character of more than one group."""
    assert compressed([1, 3, 2]) == "132"
    assert read_mask(Rle(2, 3, "132"), (2, 3)).tolist() == [[False, True, False], [True, True, False]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_png_files_of_one_channel(mode):
    small = {"1": 255, "L": 1, "P": 3, "I;16": 256}[mode]
    if mode == "I;16":
        image = PIL.Image.fromarray(MASK.astype(np.uint16) * small)
    else:
        image = PIL.Image.fromarray(MASK.astype(np.uint8) * small)
        if mode == "P":
            image = PIL.Image.frombytes("P", image.size, image.tobytes())
            image.putpalette([0, 0, 0] * 256)
        elif mode == "1":
            image = image.convert("1")
    assert np.array_equal(read_mask(saved(image, "PNG"), MASK.shape), MASK)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (
            saved(PIL.Image.new("L", (18, 13)), "PNG"),
            "18 x 13 pixels and its image, after its EXIF orientation, 18 x 12",
        ),
        (saved(PIL.Image.new("RGB", (18, 12)), "PNG"), "is a PNG file of mode RGB: send one channel"),
        (b"junk", r"is not a PNG file, or is damaged \(4 bytes\)"),
        (saved(PIL.Image.fromarray(MASK), "PNG")[:60], "damaged"),
        (Rle(18, 12, [216]), "has 12 x 18 pixels"),
        (Rle(12, 18, [215]), "has run lengths of 215 pixels, and its size has 216"),
        (Rle(12, 18, [-1, 217]), "not COCO's"),
        (Rle(12, 18, [2**70]), "not COCO's"),
        (Rle(12, 18, ""), "not COCO's"),
        (Rle(12, 18, "é"), "not COCO's"),
        (Rle(12, 18, "~"), "not COCO's"),
        (Rle(12, 18, "1P"), "not COCO's"),
        (Rle(12, 18, "o" * 20 + "1"), "not COCO's"),
    ],
)
def test_bad_masks_are_refused(mask, said):
    with pytest.raises(BadMask, match=said):
        read_mask(mask, MASK.shape)


def test_metadata_of_a_mask_is_not_read():
    profile = (b"iCCP", b"a\0\0" + zlib.compress(bytes(10**6), 9))
    pixel = (b"IDAT", zlib.compress(b"\0\1"))
    mask = hostile_images.png(1, 1, *[profile] * 5000, pixel)
    began = time.thread_time()
    assert read_mask(mask, (1, 1)).all()
    assert time.thread_time() - began < 2
    with pytest.raises(BadMask, match="is refused: the PNG has over 16,384 chunks"):
        read_mask(hostile_images.png(1, 1, *[(b"teSt", b"")] * 20_000, pixel), (1, 1))


@pytest.mark.parametrize("size", [(4, 6), (12, 18), (1, 1), (3, 9)])
def test_areas_are_those_of_resizing_by_area(size):
    ys, xs = np.linspace(0, 12, size[0] + 1), np.linspace(0, 18, size[1] + 1)
    mean = interpolate(torch.tensor(MASK)[None, None].double(), size, mode="area")[0, 0]
    np.testing.assert_allclose(shares(MASK, ys, xs), mean * (12 * 18 / (size[0] * size[1])))


def test_areas_of_cells_between_pixels():
    """As of cells of whole pixels of a mask that has each pixel seven times in both directions."""
    ys, xs = np.array([1, 9, 30, 30, 84]) / 7, np.array([0, 5, 100, 126]) / 7
    fine = MASK.repeat(7, axis=0).repeat(7, axis=1)
    expected = [[fine[int(a * 7 + 0.5) : int(b * 7 + 0.5), int(c * 7 + 0.5) : int(d * 7 + 0.5)].sum() / 49
                 for c, d in itertools.pairwise(xs)] for a, b in itertools.pairwise(ys)]  # fmt: skip
    np.testing.assert_allclose(shares(MASK, ys, xs), expected, atol=1e-9)


def test_a_mask_is_cropped_with_its_image():
    """Resized to half, 6 rows and 4 columns cut at either side, on a map whose last row reaches beyond the input."""
    placement = Placement((48, 48), 0.5, 0.5, 6, 4, (12, 16))
    mask = np.random.default_rng(1).random((48, 48)) < 0.5
    (weights,) = placement.carry_masks([Rle(48, 48, counts(mask))], [MapGrid(2, 2, 8, 8)])
    cells = mask[12:36, 8:40].astype(float)
    areas = np.array([[cells[:16, :16].sum(), cells[:16, 16:].sum()], [cells[16:, :16].sum(), cells[16:, 16:].sum()]])
    np.testing.assert_allclose(weights.reshape(2, 2), areas / areas.sum(), rtol=1e-6)


@pytest.mark.parametrize(("columns", "said"), [(slice(0, 0), "is empty"), (slice(40, 48), "the model sees")])
def test_masks_of_nothing(columns, said):
    mask = np.zeros((24, 48), bool)
    mask[:, columns] = True
    fine = np.ones((24, 48), bool)
    placement = Placement((24, 48), 0.5, 0.5, 0, 4, (12, 16))
    with pytest.raises(BadMask, match=f"mask 1 .*{said}") as error:
        placement.carry_masks([Rle(24, 48, counts(one)) for one in (fine, mask)], [MapGrid(2, 2, 8, 8)])
    assert error.value.extra["mask"] == 1
