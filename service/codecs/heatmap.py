"""A heat-map of one feature map over the image as the model sees it: to look at, not to compute with."""

from __future__ import annotations

import io
import math

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.functional import pil_to_tensor

from fxcore.images.files import open_image
from fxcore.images.preprocessing import Preprocessing
from service.problems import NoHeatMap

MEDIA_TYPE = "image/png"

MAX_PIXELS = 2 * 1024**2
"""Maximum pixels that are drawn: a screen, and the input of a detector. Drawing takes 76 bytes a pixel, which admission
does not count."""

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

# The image's share of a pixel where the feature map is strongest, and where it is weakest.
_IMAGE_SHARE = 0.35


def write(
    data: bytes, preprocessing: Preprocessing | None, tensor: Tensor, layout: str | None
) -> list[bytes | memoryview]:
    """Return a PNG of the size that the model sees: inferno of the mean magnitude over the channels, over the grey
    image.

    An image of more than :data:`MAX_PIXELS` is drawn smaller.

    Args:
        data: the encoded image.
        preprocessing: of the model's input; its crop is shown. None: the whole image.
        tensor: the feature map of that one image, ``[1, …]``.
        layout: of ``tensor``.

    Raises:
        Problem: 422 ``no-heat-map``: the tensor is no map over the image.
    """
    strength = _strength(tensor, layout)
    shown = _displayed(data, preprocessing)
    height, width = shown.shape[:2]
    resized = PIL.Image.fromarray(strength).resize((width, height), PIL.Image.Resampling.BICUBIC)
    colours = _colours(np.asarray(resized).clip(0.0, 1.0))
    grey = shown.mean(axis=2, keepdims=True)
    blended = _IMAGE_SHARE * grey + (1.0 - _IMAGE_SHARE) * colours
    buffer = io.BytesIO()
    PIL.Image.fromarray(blended.round().clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return [buffer.getvalue()]


def check(shape: list[int | None] | None, layout: str | None) -> None:
    """Raise what :func:`write` would for a tensor of ``shape``, before there is one.

    Raises:
        Problem: 422 ``no-heat-map``.
    """
    if shape is not None and (layout, len(shape)) in (("NCHW", 4), ("NHWC", 4), ("tokens", 3)):
        return
    raise NoHeatMap(
        f"a heat-map needs a feature map ([N, C, H, W], [N, H, W, C] or tokens) and this node gives {shape}; ask for a "
        "node before the pooling, such as a level, without pool",
    )


def _strength(tensor: Tensor, layout: str | None) -> npt.NDArray[np.float32]:
    """``[H, W]`` in [0, 1]: the mean magnitude over the channels, from its smallest to its largest."""
    check(list(tensor.shape), layout)
    values = tensor[0].float().abs()
    if layout == "tokens":
        values = values.mean(dim=-1)
        side = math.isqrt(len(values))
        # Tokens before the grid have no position: ViT's class token, and registers.
        values = values[len(values) - side * side :].reshape(side, side)
    else:
        values = values.mean(dim=-1 if layout == "NHWC" else 0)
    values = torch.nan_to_num(values)
    low, high = values.min(), values.max()
    result: npt.NDArray[np.float32] = ((values - low) / (high - low).clamp(min=1e-12)).numpy()
    return result


def _displayed(data: bytes, preprocessing: Preprocessing | None) -> npt.NDArray[np.float32]:
    """``[H, W, 3]`` in [0, 255]: the model's input with its normalisation undone."""
    image = open_image(data)
    pixels = pil_to_tensor(image) if preprocessing is None else preprocessing.image(image)
    height, width = pixels.shape[-2:]
    if height * width > MAX_PIXELS:
        size = smaller(height, width)
        pixels = functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
    if preprocessing is not None:
        described = preprocessing.describe()
        mean, std = (torch.tensor(described[name]).reshape(3, 1, 1) for name in ("mean", "std"))
        pixels = (pixels * std + mean).clamp(0, 1) * 255
    result: npt.NDArray[np.float32] = pixels.float().permute(1, 2, 0).numpy()
    return result


def smaller(height: int, width: int) -> tuple[int, int]:
    """Return the largest size of about these proportions that has at most :data:`MAX_PIXELS`."""
    scale = math.sqrt(MAX_PIXELS / (height * width))
    height = min(max(1, int(height * scale)), MAX_PIXELS)
    return height, min(max(1, int(width * scale)), MAX_PIXELS // height)


def _colours(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``[H, W]`` in [0, 1] → ``[H, W, 3]`` in [0, 255]."""
    positions = np.linspace(0.0, 1.0, len(_INFERNO))
    channels = [np.interp(values, positions, _INFERNO[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).astype(np.float32)
