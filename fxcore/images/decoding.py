"""Decode and preprocess images to rows of a model's input, in one of three modes.

- ``default``: what torchvision documents, ``weights.transforms()(decode_image(data, mode="RGB",
  apply_exif_orientation=True))``, to the bit. JPEG files are decoded by libjpeg-turbo (simplejpeg), others by PIL, with
  equal pixels; PIL decodes or refuses files that simplejpeg does not take. 16-bit PNG files keep their lower bits, and
  GIF files have torchvision's background. Of torchvision's decoders, which damaged files crash, only the one of WebP is
  used: it is a call into libwebp, and takes a third of PIL's time. The EXIF orientation is applied to WebP too, which
  torchvision does not do.
- ``pil``: ``weights.transforms()`` of the PIL image, to the bit.
- ``fast``: like ``default``, but where the weights resize bilinearly, a JPEG of at least four times the target height
  and width is decoded at 1/2, of eight times at 1/4. Pixels then differ by a few tenths of a grey level in the mean and
  by up to 10 at hard edges; the cosine similarity of features is over 0.9998.

Resized and cropped images stay uint8, a quarter of the bytes of floats, until their batch is complete; they are
normalised on the device, channels last.

Views are NumPy's here: each call into torch releases the GIL and has to acquire it again.
"""

from __future__ import annotations

import numpy as np
import PIL.Image
import simplejpeg
import torch
import torchvision
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import functional as F

from fxcore.errors import BadTensor
from fxcore.images import resizing
from fxcore.images.files import damaged, open_image, open_within_limit, plain_jpeg_header
from fxcore.images.formats import deep_png, gif
from fxcore.images.preprocessing import ImagePreprocessing, Preprocessing
from fxcore.images.presets import ImageClassification, SemanticSegmentation
from fxcore.images.resizing import Pixels

PREPROCESS_MODES = {
    "default": 'weights.transforms()(torchvision.io.decode_image(data, mode="RGB", apply_exif_orientation=True))',
    "pil": "weights.transforms()(PIL image)",
    "fast": "as default, and large JPEG files are decoded at a half or a quarter",
}
"""What each mode computes, as Python where that says it all."""

# Not 1/8, which keeps one value of each 8 x 8 block: features would differ visibly.
_DENOMINATORS = (4, 2)
_OVERSAMPLING = 2

_MAX_WIDTHS = 64
_PIXEL_BYTES = 4
"""Bytes of a pixel in PIL's memory, and in the resizing."""


def decode(data: bytes, max_pixels: int | None = None, exactly: bool = True) -> Tensor:
    """Decode an image to uint8 ``[H, W, 3]``; of 16-bit values the upper eight bits.

    Args:
        max_pixels: maximum pixels of the image.
        exactly: give GIF files torchvision's background; otherwise they have PIL's.

    Raises:
        BadImage, ImageTooLarge: see :func:`fxcore.images.files.open_image`.
    """
    header = _jpeg_header(data, max_pixels)
    pixels = None if header is None else _jpeg(data, header[0])
    if header is None or pixels is None:
        return torch.from_numpy(_by_pil(data, max_pixels, exactly))
    return _tensor(_turned(pixels, header[1]))


class Decoder:
    """Applies ``preprocessing`` to encoded images or pixels. Thread-safe; set torch to one thread in each thread.

    Attributes:
        plain: whether the preprocessing is antialiased resizing, cropping and normalising only.
        scales: whether ``fast`` is faster than ``default``.
        dtype: of the rows: uint8 if ``plain``, resized and cropped but not normalised yet; else float32. 16-bit images
            become float32 in either case, but not in the mode ``pil``.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self._preprocessing = preprocessing
        self.plain = isinstance(preprocessing, ImagePreprocessing) and _is_plain(preprocessing.preset)
        self.scales = False
        self.dtype = torch.uint8 if self.plain else torch.float32
        if self.plain:
            assert isinstance(preprocessing, ImagePreprocessing)
            self._preset = preprocessing.preset
            self._crop: list[int] | None = getattr(self._preset, "crop_size", None)
            self._mode: str = self._preset.interpolation.value
            self.scales = self._mode == "bilinear"
            self._mean, self._std = torch.tensor(self._preset.mean), torch.tensor(self._preset.std)
            self._lines: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def image(self, data: bytes, max_pixels: int | None = None, preprocess: str = "default") -> Tensor:
        """One encoded image → one row for :meth:`batch`: uint8 ``[H, W, 3]``, or float32 ``[3, H, W]``; see ``dtype``.

        Args:
            max_pixels: maximum pixels of the image.
            preprocess: a key of :data:`PREPROCESS_MODES`.

        Raises:
            BadImage, ImageTooLarge: see :func:`fxcore.images.files.open_image`.
        """
        if preprocess != "pil" and deep_png.is_deep(data):
            return self._preprocessing.pixels(_deep(data, max_pixels))
        if not self.plain or preprocess == "pil":
            return self.pixels(decode(data, max_pixels, exactly=preprocess != "pil"), preprocess)
        header = _jpeg_header(data, max_pixels)
        if header is not None:
            stored, turn = header
            height, width = self._turned_size(stored, turn)
            denominator = _denominator(stored, (height, width)) if preprocess == "fast" and self.scales else 1
            by_torch = denominator > 1 or resizing.is_left_to_torch(stored, (height, width), self._mode)
            pixels = _jpeg(data, stored, denominator, "RGB" if by_torch else "RGBX")
            if pixels is not None and denominator > 1:
                # Rotated last: there are fewer pixels then, and the scaled decoder's padding stays at the lower right.
                scaled = _turned(_scaled_down(pixels, (height, width), stored, denominator), turn)
                return _tensor(scaled[self.kept(*scaled.shape[:2])])
            if pixels is not None:
                return self._row(_turned(pixels, turn))
        return self._row(_by_pil(data, max_pixels))

    def pixels(self, pixels: Tensor, preprocess: str = "default") -> Tensor:
        """One image, uint8 ``[H, W, 3]`` → one row, as :meth:`image` gives it.

        Raises:
            BadTensor: another shape or dtype.
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
        """Peak bytes of preparing a decoded image of that size."""
        pixels = height * width
        if self.plain and preprocess != "pil":
            size = self.resized(height, width)
            kept = self._preprocessing.output_size(height, width)
            return _PIXEL_BYTES * pixels + resizing.held(height, width, size, kept, self._mode)
        return (3 + _PIXEL_BYTES) * pixels + self._preprocessing.held(height, width)

    def batch(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalise rows on their device.

        Args:
            rows: uint8 ``[N, H, W, 3]``; floats are returned as they are.
            out: float32 ``[N, H, W, 3]`` to write to; allocated without it.

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
        """Height and width that an image of that size is resized to; only if ``plain``."""
        return self._preprocessing.largest_size(height, width)

    def kept(self, height: int, width: int) -> tuple[slice, slice]:
        """Rows and columns of a resized image of that size that the crop keeps; only if ``plain``."""
        if self._crop is None:
            return slice(None), slice(None)
        sides = ((height, self._crop[0]), (width, self._crop[-1]))
        lines, columns = (slice(start := round((have - keep) / 2.0), start + keep) for have, keep in sides)
        return lines, columns

    def _line(self, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, ``[width, 3]`` each: with ``[3]`` torch's broadcasting is slow."""
        line = self._lines.get((device, width))
        if line is None:
            if len(self._lines) >= _MAX_WIDTHS:
                self._lines.clear()
            mean, std = (value.to(device).repeat(width, 1) for value in (self._mean, self._std))
            line = self._lines[device, width] = mean, std
        return line

    def _turned_size(self, stored: tuple[int, int], turn: int) -> tuple[int, int]:
        """Height and width that an image is resized to before its orientation is applied."""
        if turn >= 5:
            width, height = self.resized(stored[1], stored[0])
            return height, width
        return self.resized(*stored)

    def _row(self, pixels: Pixels) -> Tensor:
        size = self.resized(pixels.shape[0], pixels.shape[1])
        lines, columns = (range(*part.indices(side)) for part, side in zip(self.kept(*size), size, strict=True))
        return torch.from_numpy(resizing.resize(pixels, size, (lines, columns), self._mode))


def _is_plain(preset: object) -> bool:
    """Return whether ``preset`` only resizes, crops and normalises, in a mode of :mod:`fxcore.images.resizing`."""
    if type(preset) not in (ImageClassification, SemanticSegmentation):
        return False
    assert isinstance(preset, (ImageClassification, SemanticSegmentation))
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


def _jpeg_header(data: bytes, max_pixels: int | None) -> tuple[tuple[int, int], int] | None:
    """Stored height and width of a JPEG file, and its orientation; None for files that PIL must decode.

    Raises:
        BadImage, ImageTooLarge: see :func:`fxcore.images.files.image_header`.
    """
    plain = plain_jpeg_header(data, max_pixels)
    if plain is not None:
        return plain[:2], 1
    image, turn, _ = open_within_limit(data, max_pixels)
    if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    return (image.height, image.width), turn


def _jpeg(data: bytes, stored: tuple[int, int], denominator: int = 1, space: str = "RGB") -> Pixels | None:
    """Decode to ``[ceil(H / denominator), ceil(W / denominator), len(space)]``, orientation not applied; None for files
    that PIL must decode or refuse."""
    height, width = (-(-side // denominator) for side in stored)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, space, min_height=height, min_width=width)
    except ValueError:
        return None
    return pixels if pixels.shape == (height, width, len(space)) else None


def _by_pil(data: bytes, max_pixels: int | None, exactly: bool = True) -> Pixels:
    if data[8:12] == b"WEBP" and (pixels := _webp(data, max_pixels)) is not None:
        return pixels
    if not exactly or not data.startswith(gif.SIGNATURES):
        return np.array(open_image(data, max_pixels))
    opened = open_within_limit(data, max_pixels)
    with opened.image as image:
        try:
            return gif.decode(opened.data, (image.height, image.width))
        except Exception as error:  # decoders fail in as many ways as there are damaged files
            raise damaged("GIF", error) from error


def _webp(data: bytes, max_pixels: int | None) -> Pixels | None:
    """Decode a WebP file; None for files that PIL must decode or refuse, as animations are."""
    image, turn, _ = open_within_limit(data, max_pixels)
    with image:
        try:
            # Looked up here: torchvision has announced its removal, and this module must load without it.
            made = torchvision.io.decode_webp(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")
        except (AttributeError, RuntimeError):
            return None
        pixels: Pixels = made.permute(1, 2, 0).numpy()
        return _turned(pixels, turn) if pixels.shape[:2] == (image.height, image.width) else None


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
    # With the stride 0 that NumPy gives to ``[None]``, torch would not recognise the image as channels last, and would
    # resize planes, which takes twice as long.
    batch = torch.from_numpy(pixels.reshape(1, *pixels.shape).transpose(0, 3, 1, 2))
    # The last row and column may stand for less than a whole pixel, so the size alone would stretch the image.
    # Rounding must not lose a row: the factor is increased by less than the precision of a float32 coordinate.
    factors = [want * denominator / have * (1 + 1e-12) for want, have in zip(target, stored, strict=True)]
    batch = interpolate(batch, scale_factor=factors, recompute_scale_factor=False, mode="bilinear", antialias=True)
    resized: Pixels = batch.numpy()[0].transpose(1, 2, 0)
    return resized[: target[0], : target[1]]


def _tensor(pixels: Pixels) -> Tensor:
    """``pixels`` as a contiguous tensor."""
    # NumPy calls an array contiguous whatever the stride of an axis of size 1; torch takes no negative stride.
    pixels = pixels.copy() if min(pixels.strides) < 0 else np.ascontiguousarray(pixels)
    return torch.from_numpy(pixels)


def _turned(pixels: Pixels, turn: int) -> Pixels:
    """Apply an EXIF orientation to ``[H, W, 3]``; returns a view."""
    match turn:
        case 2:
            return pixels[:, ::-1]
        case 3:
            return pixels[::-1, ::-1]
        case 4:
            return pixels[::-1]
        case 5:
            return pixels.transpose(1, 0, 2)
        case 6:
            return pixels[::-1].transpose(1, 0, 2)
        case 7:
            return pixels[::-1, ::-1].transpose(1, 0, 2)
        case 8:
            return pixels.transpose(1, 0, 2)[::-1]
    return pixels
