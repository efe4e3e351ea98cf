"""Pillow's limit of pixels, its decoders and the filters of warnings are the host process's."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings

import numpy as np
import PIL.Image
import pytest

from fxcore import open_image
from fxcore.errors import BadImage, ImageTooLarge
from fxcore.images.decoding import decode
from fxcore.images.files import FORMATS
from tests.hostile_images import saved

_CHECKED_BY_PILLOW = ("TIFF", "WEBP")
"""Formats whose classes in Pillow check its limit themselves."""

_HOST = """
import importlib, io, pkgutil, warnings
import numpy, torch, torchvision, PIL.Image  # whose own filters are set now
PIL.Image.init()
before = PIL.Image.MAX_IMAGE_PIXELS, list(warnings.filters)
decoders = dict(PIL.Image.DECODERS)
import fxcore, fxcore.images
for module in pkgutil.iter_modules(fxcore.images.__path__, "fxcore.images."):
    importlib.import_module(module.name)
file = io.BytesIO()
image = PIL.Image.new("P", (40, 30))
image.save(file, "PNG", transparency=bytes(range(100)))
fxcore.open_image(file.getvalue())
assert (PIL.Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before
assert {name: PIL.Image.DECODERS[name] for name in decoders} == decoders
"""


@pytest.mark.exhaustive
def test_a_process_that_imports_fxcore_keeps_its_limit_decoders_and_filters() -> None:
    done = subprocess.run([sys.executable, "-c", _HOST], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("format", FORMATS)
def test_images_over_pillows_limit(format: str, cat: PIL.Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(cat, format)
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", cat.width * cat.height // 3)
    with pytest.raises((PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)):
        PIL.Image.open(io.BytesIO(data)).load()
    if format in _CHECKED_BY_PILLOW:
        with pytest.raises(ImageTooLarge, match="MAX_IMAGE_PIXELS"):
            open_image(data)
    else:
        assert np.array_equal(open_image(data), expected)
        decode(data)
    with pytest.raises(ImageTooLarge, match="at most"):
        open_image(data, 1000)


def test_warnings_of_pillow_do_not_fail_an_image(cat: PIL.Image.Image) -> None:
    data = saved(cat.quantize(64), "PNG", transparency=bytes(range(64)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            PIL.Image.open(io.BytesIO(data)).convert("RGB")
        open_image(data)
    with pytest.raises(BadImage):
        open_image(data[:-500])
