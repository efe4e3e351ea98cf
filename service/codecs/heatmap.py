"""A heat-map of one feature map over the image as the model sees it, for display only."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.functional import pil_to_tensor

from fxcore.graph.axes.layout import TOKENS
from fxcore.graph.tokens.token_grid import TokenGrid
from fxcore.images.files import open_image
from fxcore.images.preprocessing import Preprocessing
from fxcore.pooling import as_maps
from service.problems import NoHeatMap

MEDIA_TYPE = "image/png"

MAX_PIXELS = 2 * 1024**2
"""Maximum pixels drawn: enough for a screen, and for the input of a detector. Drawing takes 76 bytes per pixel, which
admission does not count."""

# matplotlib's perceptually uniform "inferno" at 0, 1/8, … 1, as sRGB; interpolated linearly.
_INFERNO = np.array(
    [
        (0, 0, 4),
        (31, 12, 72),
        (85, 15, 109),
        (136, 34, 106),
        (186, 54, 85),
        (227, 89, 51),
        (249, 140, 10),
        (249, 201, 50),
        (252, 255, 164),
    ],
    dtype=np.float32,
)

# Share of the image in each pixel; the rest is the colour of the heat-map.
_IMAGE_SHARE = 0.35


def write(
    data: bytes,
    preprocessing: Preprocessing | None,
    tensor: Tensor,
    layout: str | None,
    tokens: TokenGrid | None = None,
    usual: tuple[int, int] | None = None,
) -> list[bytes | memoryview]:
    """Return a PNG of the size that the model sees.

    It shows the mean magnitude over the channels in inferno colours, over the grey image.

    An image of more than :data:`MAX_PIXELS` is drawn smaller.

    Args:
        data: the encoded image.
        preprocessing: preprocessing of the model's input, whose crop is shown; None for the whole image.
        tensor: the feature map of that one image, ``[1, …]``.
        layout: layout of ``tensor``.
        tokens: the grid of tokens; prefix tokens are not drawn. None for maps.
        usual: height and width of the model input that ``tokens`` belongs to; None for those of this image.

    Raises:
        Problem: 422 ``no-heat-map``: the tensor is not a map over the image.
    """
    check(list(tensor.shape), layout, tokens)
    pixels = _pixels(data, preprocessing)
    size = pixels.shape[-2], pixels.shape[-1]
    strength = _strength(tensor, layout, None if tokens is None else _grid_at(tokens, size, usual or size, tensor))
    shown = _displayed(pixels, preprocessing)
    height, width = shown.shape[:2]
    resized = PIL.Image.fromarray(strength).resize((width, height), PIL.Image.Resampling.BICUBIC)
    colours = _colours(np.asarray(resized).clip(0.0, 1.0))
    grey = shown.mean(axis=2, keepdims=True)
    blended = _IMAGE_SHARE * grey + (1.0 - _IMAGE_SHARE) * colours
    buffer = io.BytesIO()
    PIL.Image.fromarray(blended.round().clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return [buffer.getvalue()]


def check(shape: list[int | None] | None, layout: str | None, tokens: TokenGrid | None = None) -> None:
    """Check that :func:`write` accepts a tensor of ``shape``, before it is computed.

    Raises:
        Problem: 422 ``no-heat-map``.
    """
    if shape is not None and (layout, len(shape)) in (("NCHW", 4), ("NHWC", 4)):
        return
    if shape is not None and (layout, len(shape)) == (TOKENS, 3) and tokens is not None:
        return
    raise NoHeatMap(
        "a heat-map needs a feature map ([N, C, H, W], [N, H, W, C] or tokens of a grid), but this node gives "
        f"{shape}; ask for a node before the pooling, such as a level, without pool",
    )


def _grid_at(tokens: TokenGrid, size: tuple[int, int], usual: tuple[int, int], tensor: Tensor) -> TokenGrid:
    """Return the grid of the tokens in ``tensor`` for an input of ``size``."""
    sides = tokens.at(size, usual, tensor.shape[1])
    if sides is None:
        height, width = size
        raise NoHeatMap(f"these {tensor.shape[1]} tokens have no known grid for an input of {height}x{width}")
    return replace(tokens, height=sides[0], width=sides[1])


def _strength(tensor: Tensor, layout: str | None, tokens: TokenGrid | None) -> npt.NDArray[np.float32]:
    """Return ``[H, W]``: the mean magnitude over the channels, scaled to [0, 1]."""
    values = torch.nan_to_num(as_maps(tensor, layout, tokens)[0].float().abs().mean(0))
    low, high = values.min(), values.max()
    result: npt.NDArray[np.float32] = ((values - low) / (high - low).clamp(min=1e-12)).numpy()
    return result


def _pixels(data: bytes, preprocessing: Preprocessing | None) -> Tensor:
    """Return the model's input ``[C, H, W]``, or the whole image."""
    image = open_image(data)
    return pil_to_tensor(image) if preprocessing is None else preprocessing.image(image)


def _displayed(pixels: Tensor, preprocessing: Preprocessing | None) -> npt.NDArray[np.float32]:
    """Return the model's input without its normalisation, ``[H, W, C]`` in [0, 255]."""
    height, width = pixels.shape[-2:]
    if height * width > MAX_PIXELS:
        size = smaller(height, width)
        pixels = functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
    if preprocessing is not None:
        described = preprocessing.describe()
        mean, std = (torch.tensor(described[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
        pixels = (pixels * std + mean).clamp(0, 1) * 255
    result: npt.NDArray[np.float32] = pixels.float().permute(1, 2, 0).numpy()
    return result


def smaller(height: int, width: int) -> tuple[int, int]:
    """Return the largest size with about these proportions and at most :data:`MAX_PIXELS` pixels."""
    scale = math.sqrt(MAX_PIXELS / (height * width))
    height = min(max(1, int(height * scale)), MAX_PIXELS)
    return height, min(max(1, int(width * scale)), MAX_PIXELS // height)


def _colours(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Map ``[H, W]`` in [0, 1] to colours ``[H, W, 3]`` in [0, 255]."""
    positions = np.linspace(0.0, 1.0, len(_INFERNO))
    channels = [np.interp(values, positions, _INFERNO[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).astype(np.float32)
