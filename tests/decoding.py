"""Image files as torchvision decodes them, which is what references are computed from."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import torch
import torchvision
from torch import Tensor


def decoded(data: bytes) -> Tensor:
    """uint8 ``[3, H, W]`` by ``decode_image``, of an animation the first frame; by PIL what it does not take."""
    file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        image = torchvision.io.decode_image(file, mode="RGB", apply_exif_orientation=True)
    except RuntimeError:
        pixels = np.array(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1)
    return image[0] if image.ndim == 4 else image
