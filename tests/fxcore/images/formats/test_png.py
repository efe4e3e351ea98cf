"""PNG files whose compressed pixels end early, which Pillow completes with black."""

import bisect
import io
import zlib

import numpy as np
import PIL.Image
import pytest

from fxcore.errors import BadImage, BadMask
from fxcore.images.decoding import decode
from fxcore.images.masks import read_mask
from tests.hostile_images import png

GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
KINDS = [(1, GREY), (2, GREY), (4, PALETTE), (8, PALETTE), (8, GREY), (8, RGB), (8, GREY_ALPHA), (8, RGB_ALPHA)]
DEEP_KINDS = [(16, GREY), (16, RGB), (16, GREY_ALPHA), (16, RGB_ALPHA)]


def filled(value, count, size, depth, color, interlaced=False):
    """A file with ``count`` bytes of ``value`` for pixels. Ones are rows of the filter Sub, which are not all zero."""
    packed = zlib.compress(bytes([value]) * count)
    palette = [(b"PLTE", bytes(range(256)) * 3)] if color == PALETTE else []
    halves = [(b"IDAT", packed[:3]), (b"IDAT", packed[3:])]
    return png(*size, *palette, *halves, depth=depth, color=color, interlaced=interlaced)


def rows_of_pillow(size, *kind):
    """The bytes that all rows take, and all but the last, for which Pillow leaves it black.

    Pillow itself refuses pixels that end within a row.
    """

    def pixels(count):
        try:
            return np.asarray(PIL.Image.open(io.BytesIO(filled(1, count, size, *kind))))
        except OSError:
            return np.empty(0)

    most = 9 * size[1] * (1 + 8 * size[0])
    full = pixels(most)
    needed = bisect.bisect_left(range(most), True, key=lambda count: np.array_equal(pixels(count), full))
    return needed, next(count for count in reversed(range(1, needed)) if pixels(count).size)


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("size", [(17, 2), (16, 8), (19, 13)])
@pytest.mark.parametrize(("depth", "color"), KINDS + DEEP_KINDS)
def test_a_file_without_its_last_row_is_refused_and_a_black_one_is_not(size, depth, color, interlaced, value):
    needed, short = rows_of_pillow(size, depth, color, interlaced)
    whole = filled(value, needed, size, depth, color, interlaced)
    if depth < 16:
        assert np.array_equal(decode(whole), PIL.Image.open(io.BytesIO(whole)).convert("RGB"))
    assert decode(whole).shape == (size[1], size[0], 3)
    with pytest.raises(BadImage, match="the PNG data is damaged or cut short: the pixels end before the last row"):
        decode(filled(value, short, size, depth, color, interlaced))


def test_a_mask_without_its_last_row_is_refused():
    needed, short = rows_of_pillow((9, 4), 8, GREY)
    assert not read_mask(filled(0, needed, (9, 4), 8, GREY), (4, 9)).any()
    with pytest.raises(BadMask, match="damaged"):
        read_mask(filled(1, short, (9, 4), 8, GREY), (4, 9))
