"""The preprocessing of detectors, which is part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from torchvision.transforms import functional as F

from fxcore.images.placement import Placement
from fxcore.images.preprocessing import Preprocessing
from fxcore.images.sizes import ImageSize, sides


class DetectorPreprocessing(Preprocessing):
    """A detector's own ``GeneralizedRCNNTransform``: normalise, resize, and pad to a multiple of the FPN's stride."""

    pads = True

    def __init__(self, transform: Any, image_size: ImageSize | None = None) -> None:
        self._transform = transform.eval()
        if image_size is not None:
            height, width = sides(image_size)
            transform.fixed_size = (width, height)

    def describe(self) -> dict[str, Any]:
        transform = self._transform
        fixed = transform.fixed_size
        return {
            "resize_size": list(reversed(fixed)) if fixed else [transform.min_size[-1]],
            "max_size": None if fixed else transform.max_size,
            "crop_size": None,
            "pad_to_multiple_of": transform.size_divisible,
            "mean": list(transform.image_mean),
            "std": list(transform.image_std),
            "interpolation": "bilinear",
            "antialias": False,
        }

    def image(self, image: PIL.Image.Image) -> Tensor:
        return self.pixels(F.pil_to_tensor(image))

    def pixels(self, pixels: Tensor) -> Tensor:
        batch: Tensor = self._transform([F.convert_image_dtype(pixels, torch.float)])[0].tensors
        return batch[0]

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        resized = self._resized(height, width)
        multiple = self._transform.size_divisible
        return -(-resized[0] // multiple) * multiple, -(-resized[1] // multiple) * multiple

    def placement(self, height: int, width: int) -> Placement:
        resized = self._resized(height, width)
        return Placement((height, width), resized[0] / height, resized[1] / width, 0, 0, resized)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        transform = self._transform
        if transform.fixed_size:
            return transform.fixed_size[1], transform.fixed_size[0]
        scale = min(transform.min_size[-1] / min(height, width), transform.max_size / max(height, width))
        return int(height * scale), int(width * scale)

    def nominal_size(self) -> tuple[int, int]:
        side = self._transform.min_size[-1]
        return self.output_size(side, side)

    def batch(self, images: Sequence[Tensor]) -> Tensor:
        batch: Tensor = self._transform.batch_images(list(images), self._transform.size_divisible)
        return batch
