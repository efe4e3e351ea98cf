"""Decode image files with torchvision, for reference values."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import torch
import torchvision
from torch import Tensor


def decoded(data: bytes) -> Tensor:
    """Decode to uint8 ``[3, H, W]`` with ``decode_image``, or with PIL if that fails; first frame of animations."""
    file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        image = torchvision.io.decode_image(file, mode="RGB", apply_exif_orientation=True)
    except RuntimeError:
        pixels = np.array(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1)
    return image[0] if image.ndim == 4 else image
