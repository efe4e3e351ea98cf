"""A Pillow decoder for binary PPM files whose largest level is neither 255 nor, if they are grey, 65,535.

Pillow's own decoder converts level by level in Python, which takes two seconds per megapixel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile

_AT_ONCE = 2**20


class PpmLevels(PIL.ImageFile.PyDecoder):
    """A decoder with the same result as Pillow's ``PpmDecoder``."""

    _pulls_fd = True

    def decode(self, buffer: Any) -> tuple[int, int]:
        """Decode all pixels at once; see :meth:`PIL.ImageFile.PyDecoder.decode`."""
        assert self.fd is not None
        most = self.args[-1]
        kind = np.dtype("u1" if most < 256 else ">u2")
        raw_mode, top, made = ("I;32", 65535, "<u4") if self.mode == "I" else (self.mode, 255, "u1")
        scaled = np.rint(np.arange(2 ** (8 * kind.itemsize)) / most * top).clip(0, top).astype(made)
        samples = self.state.xsize * self.state.ysize * PIL.Image.getmodebands(self.mode)
        pixels = np.empty(samples, made)
        for begin in range(0, samples, _AT_ONCE):
            block = pixels[begin : begin + _AT_ONCE]
            block[:] = scaled[np.frombuffer(self.fd.read(len(block) * kind.itemsize), kind, len(block))]
        self.set_as_raw(pixels.data, raw_mode)  # type: ignore[arg-type]  # any buffer will do
        return -1, 0
