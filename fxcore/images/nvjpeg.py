"""Many JPEG files → rows of a model's input, decoded together and resized on the device: on CUDA, by nvJPEG.

Beside :class:`~fxcore.images.decoding.Decoder`, which decodes one file after another on the CPU:

- Resizing is torch's on floats, as CUDA has none that antialiases bytes, and rounds once where PIL rounds after each of
  its two passes: of equal pixels it makes values that differ by one grey level at most.
- Every file is decoded at its full size.
- The pixels are nvJPEG's, whose arithmetic may differ by a few levels. Where a file stores a quarter or half of its
  chroma, torchvision has nvJPEG repeat it, and libjpeg interpolates. libjpeg-turbo told to repeat it, which stands in
  for nvJPEG here, gives 500 x 375 photographs that are off by 0.35 grey levels in the mean after resizing, and by up to
  27 at edges of colour (300 x 260: 0.65 and 34); the cosine of resnet18's features is over 0.9997.

Not run on a GPU yet: all of it but the device's name is tested on the CPU, where torchvision decodes lists by libjpeg.
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
    """Decodes JPEG files as ``decoder`` does, many at a time on ``device``. Several threads may use it.

    Args:
        decoder: one that ``scales``.
        device: where files are decoded and rows are made.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device

    def takes(self, data: bytes) -> bool:
        """Whether a file is for :meth:`rows`, by its header and its last two bytes.

        Those are complete JFIF files in grey or colour without EXIF: nvJPEG may make an image of a file that is cut
        short, which PIL refuses.

        Raises:
            BadImage: see :func:`fxcore.images.files.plain_jpeg_header`.
        """
        # Without a JFIF segment libjpeg looks at others to tell RGB from YCbCr, and nvJPEG may decide otherwise.
        jfif = data[:4] == b"\xff\xd8\xff\xe0" and data[6:11] == b"JFIF\0"
        return jfif and data[-2:] == b"\xff\xd9" and plain_jpeg_header(data) is not None

    def rows(self, files: Sequence[bytes]) -> Tensor:
        """Rows for :meth:`fxcore.images.decoding.Decoder.batch`, complete on the device: uint8 ``[N, H, W, 3]``.

        Args:
            files: that :meth:`takes` takes, of any sizes from which the model makes one. Nothing limits them here.

        Raises:
            Exception: as torch, torchvision and nvJPEG raise them, of a file that is damaged or of a kind that is not
                decoded here, or without memory. Which file it is they do not say.
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
    """The calling thread's, by device."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.cuda.Stream] = {}


_streams = _Streams()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Queue work for a CUDA device on a stream that is the calling thread's alone, and wait for it, failed or not.

    torchvision has nvJPEG write into memory that is free on the calling thread's stream, from another stream that does
    not wait for this one (https://github.com/pytorch/vision/pull/9606): nothing may be left to do here by then.
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
