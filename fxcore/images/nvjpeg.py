"""Decode batches of JPEG files and resize them on the device; on CUDA by nvJPEG.

Differences from :class:`~fxcore.images.decoding.Decoder`, which decodes file by file on the CPU:

- Resizing is torch's on floats, since CUDA has no antialiased resizing of uint8. It rounds once, where PIL rounds after
  each of its two passes: for equal pixels, values differ by one grey level at most.
- Files are decoded at full size.
- nvJPEG's arithmetic may differ by a few grey levels. For chroma subsampling, torchvision makes nvJPEG repeat values
  where libjpeg interpolates. libjpeg-turbo set to repeat them gives, after resizing, values that differ by less than a
  grey level in the mean and by up to 34 at edges of colour; the cosine similarity of features is over 0.9997.

Not run on a GPU yet: all but the device's name is tested on the CPU, where torchvision decodes lists by libjpeg.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torchvision
from torch import Tensor
from torch.nn.functional import interpolate

from fxcore.images.decoding import Decoder
from fxcore.images.files import plain_jpeg_header


class JpegBatches:
    """Applies the preprocessing of ``decoder`` to batches of JPEG files on ``device``. Thread-safe.

    Args:
        decoder: one whose ``scales`` is True.
        device: the device to decode and resize on.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device

    def takes(self, data: bytes) -> bool:
        """Whether :meth:`rows` can decode a file, by its header and last two bytes.

        It must be a complete JFIF file in grey or colour without EXIF: nvJPEG may decode a truncated file, which PIL
        refuses.

        Raises:
            BadImage: see :func:`fxcore.images.files.plain_jpeg_header`.
        """
        # Without a JFIF segment, libjpeg guesses RGB or YCbCr from other segments, and nvJPEG may guess differently.
        jfif = data[:4] == b"\xff\xd8\xff\xe0" and data[6:11] == b"JFIF\0"
        return jfif and data[-2:] == b"\xff\xd9" and plain_jpeg_header(data) is not None

    def rows(self, files: Sequence[bytes]) -> Tensor:
        """Decode files to rows for :meth:`fxcore.images.decoding.Decoder.batch`: uint8 ``[N, H, W, 3]`` on the device.

        Args:
            files: files that :meth:`takes` accepts, of any sizes, which are not limited here; they must have one size
                after preprocessing.

        Raises:
            Exception: whatever torch, torchvision and nvJPEG raise for a damaged or unsupported file, or out of memory;
                it does not say which file.
        """
        encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
        with _own_stream(self._device):
            # Looked up here: torchvision has announced its removal, and this module must load without it.
            images = torchvision.io.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB, self._device)
            rows = torch.stack([self._row(image) for image in images])
            # Averages of bytes, so nothing has to be clamped.
            return rows.round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    def _row(self, image: Tensor) -> Tensor:
        """uint8 ``[3, h, w]`` → float32 ``[3, H, W]``."""
        target = self._decoder.resized(image.shape[1], image.shape[2])
        resized = interpolate(image[None].float(), target, mode="bilinear", antialias=True)[0]
        lines, columns = self._decoder.kept(*target)
        return resized[:, lines, columns]


class _Streams(threading.local):
    """CUDA streams of the calling thread, by device."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.cuda.Stream] = {}


_streams = _Streams()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a CUDA stream of the calling thread alone, and synchronise it at the end, also after an error.

    torchvision makes nvJPEG write to memory of the caller's stream from another stream without waiting for the former
    (https://github.com/pytorch/vision/pull/9606), so no work may be pending on it.
    """
    if device.type != "cuda":
        yield
        return
    stream = _streams.by_device.get(device)
    if stream is None:
        stream = _streams.by_device[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()
