"""Against zlib's own unpacking in one go."""

import gzip
import zlib

import pytest

from service.codecs.compression import compress, decompress
from service.problems import Problem

STEP = 64 * 1024
WINDOWS = {"gzip": 31, "deflate": 15, "raw deflate": -15}
JSON = b'{"inputs": [0,1,2,3]}'


def packed(data, how, level):
    packer = zlib.compressobj(level, zlib.DEFLATED, WINDOWS[how])
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("how", WINDOWS)
@pytest.mark.parametrize("unit", [b"\0", b" ", JSON], ids=["zeros", "spaces", "JSON"])
@pytest.mark.parametrize("level", [1, 6, 9])
def test_unpacks_what_zlib_does_wherever_a_step_ends(how, unit, level):
    """A match of up to 258 bytes lies across the end of a step, and may be the last thing there is."""
    sizes = {0, 1, *(steps * STEP + more for steps in (1, 2) for more in [*range(-2, 24), 100, 257, 258, 259, 300])}
    for size in sorted(sizes):
        data = (unit * (size // len(unit) + 1))[:size]
        body = packed(data, how, level)
        assert zlib.decompress(body, WINDOWS[how]) == data
        assert decompress(body, how.split()[-1], size) == data, size


@pytest.mark.parametrize("how", WINDOWS)
def test_a_body_that_is_cut_short_or_goes_on_is_refused(how):
    body = packed(b"\0" * (STEP + 1), how, 6)
    for cut in range(len(body)):
        with pytest.raises(Problem):
            decompress(body[:cut], how.split()[-1], 2 * STEP)
    with pytest.raises(Problem, match="bytes follow its end"):
        decompress(body + b"\0", how.split()[-1], 2 * STEP)


@pytest.mark.parametrize("limit", [999, STEP])
def test_the_limit_holds_within_a_step_and_after_the_last_byte(limit):
    body = packed(b"\0" * (limit + 1), "raw deflate", 6)
    with pytest.raises(Problem, match=f"more than {limit:,} bytes") as refusal:
        decompress(body, "deflate", limit)
    assert refusal.value.slug == "body-too-large"


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_other_libraries_unpack_what_is_packed(encoding, unpack):
    parts = [JSON, memoryview(bytes(3 * STEP + 5)), b"", JSON]
    assert unpack(b"".join(compress(parts, encoding))) == b"".join(parts)
