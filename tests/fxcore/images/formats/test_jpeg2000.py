"""What is refused of JPEG 2000 files, before OpenJPEG allocates anything."""

from __future__ import annotations

import contextlib
import io
import struct
import time

import numpy as np
import PIL.Image
import pytest

from fxcore import open_image
from fxcore.errors import BadImage
from fxcore.images.files import image_header
from tests.hostile_images import HOSTILE, jpeg2000, photo, saved


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jpeg 2000 of tiles", "has 1,024 tiles, and at most 256 are allowed for its size; save it again"),
        ("raw jpeg 2000 of tiles", "has 1,024 tiles"),
        ("jpeg 2000 of components", "has 16,384 components, and at most 4 are allowed"),
        ("jpeg 2000 of layers", "has 65,535 quality layers, and at most 256 are allowed"),
        ("jpeg 2000 of code-blocks", "has code-blocks of 4 x 4, and at least 256 coefficients are required"),
        ("jpeg 2000 of precincts", "has precincts of 1 x 1 at resolution 0 of 5, and at least 2 x 2 are required"),
        ("jpeg 2000 of two sizes", "has two sizes"),
        ("jpeg 2000 of segments", "has over 65,536 segments"),
    ],
)
def test_what_costs_more_than_its_pixels_is_refused(name: str, message: str) -> None:
    data = HOSTILE[name][0]()
    began = time.thread_time()
    with pytest.raises(BadImage, match=message):
        image_header(data)
    assert time.thread_time() - began < 2


def test_the_limits_themselves_are_allowed() -> None:
    assert image_header(jpeg2000(256, 2, bytes(17 * side for side in range(1, 7))))[:2] == (80, 120)


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">HH", marker, len(body) + 2) + body


@pytest.mark.parametrize("marker", [0xFF52, 0xFF53])
@pytest.mark.parametrize("psot", [12, None])
def test_styles_of_tiles_and_components_are_checked_too(marker: int, psot: int | None) -> None:
    """A style in the header of a later tile-part, after one that is empty or has a length."""
    data = jpeg2000()
    at, start = data.index(b"\xff\x90"), data.index(b"\xff\x93")
    style = b"\5\0\0\0\1"  # five levels, code-blocks of 4 x 4
    body = b"\0\0\0\1\0" + style if marker == 0xFF52 else b"\0\0" + style
    second = data[at : at + 12] + segment(marker, body) + data[start:]
    first = segment(0xFF90, data[at + 4 : at + 6] + struct.pack(">I", psot or 20) + b"\0\2") + b"\xff\x93"
    first += b"" if psot else bytes(6)
    with pytest.raises(BadImage, match="code-blocks of 4 x 4"):
        image_header(data[:at] + first + second)


def test_markers_that_openjpeg_skips_are_refused() -> None:
    data = jpeg2000()
    with pytest.raises(BadImage, match="damaged or cut short"):
        image_header(data[:51] + b"\xff\x30\xff\xff" + data[51:])


@pytest.mark.parametrize("cut", range(0, 200, 14))
def test_files_that_are_cut_short_are_refused_or_read(cut: int) -> None:
    for boxes in (False, True):
        data = jpeg2000(boxes=boxes)
        with contextlib.suppress(BadImage):
            assert image_header(data[:cut])[:2] == (80, 120)


@pytest.mark.parametrize(
    "options",
    [
        {"tile_size": (64, 48), "num_resolutions": 3},
        {"tile_offset": (10, 5), "offset": (13, 9), "tile_size": (40, 40)},
        {"quality_layers": [80, 40, 20, 10], "progression": "RPCL"},
        {"codeblock_size": (16, 16), "precinct_size": (64, 64), "num_resolutions": 4},
        {"codeblock_size": (1024, 4), "irreversible": True, "plt": True},
    ],
)  # fmt: skip
@pytest.mark.parametrize("no_jp2", [True, False])
def test_what_programs_write_is_read(options: dict[str, object], no_jp2: bool) -> None:
    data = saved(photo(), "JPEG2000", no_jp2=no_jp2, **options)
    expected = PIL.Image.open(io.BytesIO(data)).convert("RGB")
    assert image_header(data)[:2] == (expected.height, expected.width)
    assert np.array_equal(open_image(data), expected)


def test_tiles_of_a_large_image_may_be_small() -> None:
    data = saved(PIL.Image.new("L", (640, 640), 7), "JPEG2000", tile_size=(32, 32))
    assert np.asarray(open_image(data)).min() == 7
