"""Decode and preprocess images to rows of a model's input, in one of three modes.

- ``default``: exactly the pixels that torchvision documents, ``weights.transforms()(decode_image(data, mode="RGB",
  apply_exif_orientation=True))``. JPEG files are decoded by libjpeg-turbo (simplejpeg), others by PIL, with equal
  pixels; PIL decodes or rejects files that simplejpeg does not support. 16-bit PNG files keep their lower bits, and GIF
  files have torchvision's background. torchvision's decoders crash on damaged files; only the one for WebP is used,
  which is a call into libwebp. Unlike in torchvision, the EXIF orientation applies to WebP too.
- ``pil``: exactly ``weights.transforms()`` of the PIL image.
- ``fast``: like ``default``, but if the weights resize bilinearly, a JPEG of at least four times the target height and
  width is decoded at 1/2, of eight times at 1/4. Pixels then differ by a few tenths of a grey level on average and by
  up to 10 at hard edges; the cosine similarity of features is over 0.9998.

Resized and cropped images stay uint8, a quarter of the bytes of floats, until their batch is complete; they are
normalised on the device, channels last.

This module uses NumPy views, because each call into torch releases the GIL and has to reacquire it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import simplejpeg
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import functional as F

from fxcore.errors import BadTensor
from fxcore.images import resizing
from fxcore.images.files import Opened, damaged, open_within_limit, plain_header, to_rgb
from fxcore.images.formats import deep_png, gif, webp
from fxcore.images.preprocessing import ImagePreprocessing, Preprocessing
from fxcore.images.presets import ImageClassification, SemanticSegmentation
from fxcore.images.resizing import Pixels

PREPROCESS_MODES = {
    "default": 'weights.transforms()(torchvision.io.decode_image(data, mode="RGB", apply_exif_orientation=True))',
    "pil": "weights.transforms()(PIL image)",
    "fast": "as default, and large JPEG files are decoded at a half or a quarter",
}
"""Descriptions of the modes, as Python code if possible."""

# Not 1/8, which keeps only one value of each 8 x 8 block: features would differ noticeably.
_DENOMINATORS = (4, 2)
_OVERSAMPLING = 2

_MAX_WIDTHS = 64
_PIXEL_BYTES = 4
"""Bytes of a pixel in PIL's memory, and in the resizing."""


def decode(data: bytes, max_pixels: int | None = None, exactly: bool = True) -> Tensor:
    """Decode an image to uint8 ``[H, W, 3]``, keeping the upper eight bits of 16-bit values.

    Args:
        max_pixels: maximum number of pixels of the image.
        exactly: give GIF files torchvision's background instead of PIL's.

    Raises:
        BadImage, ImageTooLarge: see :func:`fxcore.images.files.open_image`.
    """
    return _tensor(_decoded(data, _open(data, max_pixels), max_pixels, exactly))


def decode_floats(data: bytes, max_pixels: int | None = None) -> Tensor:
    """Decode an image to float32 ``[3, H, W]`` from 0 to 1, keeping all 16 bits of PNG files.

    Args:
        max_pixels: maximum number of pixels of the image.

    Raises:
        BadImage, ImageTooLarge: see :func:`fxcore.images.files.open_image`.
    """
    if deep_png.is_deep(data):
        return _deep(data, max_pixels).to(torch.float32) / 65535
    return decode(data, max_pixels).permute(2, 0, 1) / 255


class Decoder:
    """A decoder that applies ``preprocessing`` to encoded images or pixels.

    Thread-safe; set torch to one thread in each thread.

    Attributes:
        plain: whether the preprocessing is only antialiased resizing, cropping and normalising.
        scales: whether ``fast`` is faster than ``default``.
        dtype: dtype of the rows: uint8 if ``plain`` (resized and cropped but not yet normalised), else float32. 16-bit
            images become float32 in either case, except in ``pil`` mode.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self._preprocessing = preprocessing
        self.plain = self.scales = False
        self.dtype = torch.float32
        if isinstance(preprocessing, ImagePreprocessing) and _is_plain(preprocessing.preset):
            self.plain, self.dtype = True, torch.uint8
            self._preset = preprocessing.preset
            self._crop: list[int] | None = getattr(self._preset, "crop_size", None)
            self._mode: str = self._preset.interpolation.value
            self.scales = self._mode == "bilinear"
            self._mean, self._std = torch.tensor(self._preset.mean), torch.tensor(self._preset.std)
            self._lines: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def image(self, data: bytes, max_pixels: int | None = None, preprocess: str = "default") -> Tensor:
        """Decode an image to a row for :meth:`batch`: uint8 ``[H, W, 3]``, or float32 ``[3, H, W]``; see ``dtype``.

        Args:
            max_pixels: maximum number of pixels of the image.
            preprocess: a key of :data:`PREPROCESS_MODES`.

        Raises:
            BadImage, ImageTooLarge: see :func:`fxcore.images.files.open_image`.
        """
        if preprocess != "pil" and deep_png.is_deep(data):
            return self._preprocessing.pixels(_deep(data, max_pixels))
        if not self.plain or preprocess == "pil":
            return self.pixels(decode(data, max_pixels, exactly=preprocess != "pil"), preprocess)
        opened, space = _open(data, max_pixels), "RGBX"
        if isinstance(opened, _Direct) and opened.format == "JPEG":
            _, stored, turn = opened
            height, width = self._turned_size(stored, turn)
            denominator = _denominator(stored, (height, width)) if preprocess == "fast" and self.scales else 1
            if denominator > 1 and (pixels := _jpeg(data, stored, denominator)) is not None:
                # Rotate last: there are fewer pixels, and the scaled decoder's padding is still at the lower right.
                scaled = _turned(_scaled_down(pixels, (height, width), stored, denominator), turn)
                return _tensor(scaled[self.kept(*scaled.shape[:2])])
            if resizing.is_left_to_torch(stored, (height, width)):
                space = "RGB"
        return self._row(_decoded(data, opened, max_pixels, space=space))

    def pixels(self, pixels: Tensor, preprocess: str = "default") -> Tensor:
        """Preprocess an image, uint8 ``[H, W, 3]``, to a row as returned by :meth:`image`.

        Raises:
            BadTensor: ``pixels`` has another shape or dtype.
        """
        if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.numel() == 0:
            raise BadTensor(f"an image is uint8 [H, W, 3]; this is {pixels.dtype} {list(pixels.shape)}")
        if preprocess == "pil":
            image = PIL.Image.fromarray(pixels.numpy())
            if not self.plain:
                return self._preprocessing.image(image)
            image = F.resize(image, list(self.resized(image.height, image.width)), self._preset.interpolation)
            return torch.from_numpy(np.array(image if self._crop is None else F.center_crop(image, self._crop)))
        return self._row(pixels.numpy()) if self.plain else self._preprocessing.pixels(pixels.permute(2, 0, 1))

    def held(self, height: int, width: int, preprocess: str = "default") -> int:
        """Return the peak bytes of preprocessing a decoded image of that size."""
        pixels = height * width
        if self.plain and preprocess != "pil":
            size = self.resized(height, width)
            kept = self._preprocessing.output_size(height, width)
            return _PIXEL_BYTES * pixels + resizing.held(height, width, size, kept)
        return (3 + _PIXEL_BYTES) * pixels + self._preprocessing.held(height, width)

    def batch(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalise rows on their device.

        Args:
            rows: uint8 ``[N, H, W, 3]``; floats are returned unchanged.
            out: float32 ``[N, H, W, 3]`` to write to; allocated if None.

        Returns:
            ``[N, 3, H, W]``, channels last.
        """
        if rows.dtype != torch.uint8:
            return rows
        floats = torch.empty(rows.shape, device=rows.device) if out is None else out
        mean, std = self._line(rows.device, rows.shape[2])
        floats.copy_(rows).div_(255).sub_(mean).div_(std)  # step by step, with torchvision's rounding
        return floats.permute(0, 3, 1, 2)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image of that size is resized to; only if ``plain``."""
        return self._preprocessing.largest_size(height, width)

    def kept(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the rows and columns of a resized image of that size that the crop keeps; only if ``plain``."""
        if self._crop is None:
            return slice(None), slice(None)
        sides = ((height, self._crop[0]), (width, self._crop[-1]))
        lines, columns = (slice(start := round((have - keep) / 2.0), start + keep) for have, keep in sides)
        return lines, columns

    def _line(self, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, ``[width, 3]`` each, since torch broadcasts ``[3]`` slowly."""
        line = self._lines.get((device, width))
        if line is None:
            if len(self._lines) >= _MAX_WIDTHS:
                self._lines.clear()
            mean, std = (value.to(device).repeat(width, 1) for value in (self._mean, self._std))
            line = self._lines[device, width] = mean, std
        return line

    def _turned_size(self, stored: tuple[int, int], turn: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to before its orientation is applied."""
        if turn >= 5:
            width, height = self.resized(stored[1], stored[0])
            return height, width
        return self.resized(*stored)

    def _row(self, pixels: Pixels) -> Tensor:
        size = self.resized(pixels.shape[0], pixels.shape[1])
        lines, columns = (range(*part.indices(side)) for part, side in zip(self.kept(*size), size, strict=True))
        return torch.from_numpy(resizing.resize(pixels, size, (lines, columns), self._mode))


def _is_plain(preset: Any) -> bool:
    """Return whether ``preset`` only resizes, crops and normalises, in a mode of :mod:`fxcore.images.resizing`."""
    if type(preset) not in (ImageClassification, SemanticSegmentation):
        return False
    crop = getattr(preset, "crop_size", None)
    resize = preset.resize_size
    # A smaller image is padded to the crop.
    fills = crop is None or (resize[0] >= crop[0] and resize[-1] >= crop[-1])
    return fills and preset.interpolation.value in resizing.MODES and bool(preset.antialias)


def _denominator(stored: tuple[int, int], target: tuple[int, int]) -> int:
    for denominator in _DENOMINATORS:
        if all(have >= denominator * _OVERSAMPLING * want for have, want in zip(stored, target, strict=True)):
            return denominator
    return 1


class _Direct(NamedTuple):
    """A file that is decoded without PIL.

    Attributes:
        format: ``JPEG``, for simplejpeg, or ``WEBP``, for libwebp.
        stored: height and width, orientation not applied.
        turn: the EXIF orientation, 1 to 8.
    """

    format: str
    stored: tuple[int, int]
    turn: int


def _open(data: bytes, max_pixels: int | None) -> _Direct | Opened:
    """Read the header of an image; files other than JPEG and WebP are opened by PIL.

    Raises:
        BadImage, ImageTooLarge: see :func:`fxcore.images.files.image_header`.
    """
    plain = plain_header(data, max_pixels)
    if plain is not None:
        return _Direct("WEBP" if data[:4] == b"RIFF" else "JPEG", plain[:2], 1)
    opened = open_within_limit(data, max_pixels)
    image, stored = opened.image, (opened.image.height, opened.image.width)
    if image.format == "WEBP":
        return _Direct("WEBP", stored, opened.turn)
    if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
        return _Direct("JPEG", stored, opened.turn)
    return opened


def _decoded(
    data: bytes, opened: _Direct | Opened, max_pixels: int | None, exactly: bool = True, space: str = "RGB"
) -> Pixels:
    """Decode to ``[H, W, len(space)]``, or ``[H, W, 3]`` if the decoder supports only that; may be read-only."""
    if not isinstance(opened, Opened):
        kind, stored, turn = opened
        pixels = _jpeg(data, stored, space=space) if kind == "JPEG" else webp.decode(data, stored)
        if pixels is not None:
            return _turned(pixels, turn)
        opened = open_within_limit(data, max_pixels)
    return _by_pil(opened, exactly, space)


def _jpeg(data: bytes, stored: tuple[int, int], denominator: int = 1, space: str = "RGB") -> Pixels | None:
    """Decode to ``[ceil(H / denominator), ceil(W / denominator), len(space)]`` without applying the orientation.

    None for files that PIL must decode or reject.
    """
    height, width = (-(-side // denominator) for side in stored)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, space, min_height=height, min_width=width)
    except ValueError:
        return None
    return pixels if pixels.shape == (height, width, len(space)) else None


def _by_pil(opened: Opened, exactly: bool, space: str) -> Pixels:
    """Decode to ``[H, W, len(space)]``, or GIF files to ``[H, W, 3]``; may be read-only."""
    if exactly and opened.image.format == "GIF":
        with opened.image as image:
            try:
                return gif.decode(opened.data, (image.height, image.width))
            except Exception as error:  # decoders fail in as many ways as there are damaged files
                raise damaged("GIF", error) from error
    image = to_rgb(opened)
    if space == "RGB":
        return np.array(image)
    # Keep PIL's four bytes per pixel, which resizing expects: dropping and adding the fourth takes twice as long.
    return np.frombuffer(image.tobytes("raw", space), np.uint8).reshape(image.height, image.width, len(space))


def _deep(data: bytes, max_pixels: int | None) -> Tensor:
    """Decode a PNG file of 16 bits per sample to uint16 ``[3, H, W]``."""
    opened = open_within_limit(data, max_pixels)
    try:
        pixels = deep_png.decode(opened.data)
    except Exception as error:  # as above
        raise damaged("PNG", error) from error
    return _tensor(_turned(pixels, opened.turn)).permute(2, 0, 1)  # type: ignore[arg-type]  # of any dtype


def _scaled_down(pixels: Pixels, target: tuple[int, int], stored: tuple[int, int], denominator: int) -> Pixels:
    """Resize ``[h, w, 3]``, decoded at a fraction of the size ``stored``, to ``[*target, 3]``."""
    # NumPy gives ``[None]`` a stride of 0, with which torch would not recognise the image as channels last. It would
    # then resize planes, which takes twice as long.
    batch = torch.from_numpy(pixels.reshape(1, *pixels.shape).transpose(0, 3, 1, 2))
    # The last row and column may cover less than a whole pixel, so passing the size would stretch the image. The factor
    # is increased by less than the precision of a float32 coordinate, so that rounding does not lose a row.
    factors = [want * denominator / have * (1 + 1e-12) for want, have in zip(target, stored, strict=True)]
    batch = interpolate(batch, scale_factor=factors, recompute_scale_factor=False, mode="bilinear", antialias=True)
    resized: Pixels = batch.numpy()[0].transpose(1, 2, 0)
    return resized[: target[0], : target[1]]


def _tensor(pixels: Pixels) -> Tensor:
    """Convert ``pixels`` to a contiguous tensor."""
    # NumPy ignores the stride of axes of size 1 when it checks contiguity, and torch rejects negative strides.
    pixels = pixels.copy() if min(pixels.strides) < 0 else np.ascontiguousarray(pixels)
    return torch.from_numpy(pixels)


def _turned(pixels: Pixels, turn: int) -> Pixels:
    """Apply an EXIF orientation to ``[H, W, 3]``; return a view."""
    if turn >= 5:
        pixels = pixels.transpose(1, 0, 2)
    down = -1 if turn in (3, 4, 7, 8) else 1
    across = -1 if turn in (2, 3, 6, 7) else 1
    return pixels[::down, ::across]
