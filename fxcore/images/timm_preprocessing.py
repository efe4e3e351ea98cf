"""timm's preprocessing: resize by a crop percentage, crop, scale to [0, 1] and normalise, with timm's own transform."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Mapping
from typing import Any

import PIL.Image
from torch import Tensor

from fxcore.images.preprocessing import Preprocessing, resizing_bytes
from fxcore.images.sizes import ImageSize, resized_size, sides


class TimmPreprocessing(Preprocessing):
    """Preprocessing by ``timm.data.create_transform(**config, is_training=False)``.

    Args:
        config: the result of ``timm.data.resolve_data_config``.
        image_size: size of the input; by default that of ``config``.

    Attributes:
        transform: the transform that :meth:`image` applies.
    """

    fits = True

    def __init__(self, config: Mapping[str, Any], image_size: ImageSize | None = None) -> None:
        self.config = dict(config)
        if image_size is not None:
            self.config["input_size"] = (config["input_size"][0], *sides(image_size))
        self.transform = importlib.import_module("timm.data").create_transform(**self.config, is_training=False)

    def describe(self) -> dict[str, Any]:
        config = self.config
        square = len(set(self._scaled())) == 1 and config["crop_mode"] == "center"
        return {
            "resize_size": self._scaled()[:1] if square else self._scaled(),
            "crop_size": list(self.nominal_size()),
            "crop_pct": config["crop_pct"],
            "crop_mode": config["crop_mode"],
            "mean": list(config["mean"]),
            "std": list(config["std"]),
            "interpolation": config["interpolation"],
            "antialias": True,
        }

    def image(self, image: PIL.Image.Image) -> Tensor:
        result: Tensor = self.transform(image)
        return result

    def normalization(self) -> tuple[list[float], list[float]] | None:
        return list(self.config["mean"]), list(self.config["std"])

    def without_normalization(self) -> TimmPreprocessing:
        made = copy.copy(self)
        channels = len(self.config["mean"])
        made.config = {**self.config, "mean": (0.0,) * channels, "std": (1.0,) * channels}
        made.transform = copy.copy(self.transform)
        made.transform.transforms = self.transform.transforms[:-1]
        return made

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.nominal_size()

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        scaled, mode = self._scaled(), self.config["crop_mode"]
        if mode == "squash":
            return scaled[0], scaled[1]
        if mode == "center" and scaled[0] == scaled[1]:
            return resized_size(scaled[:1], height, width)
        ratios = height / scaled[0], width / scaled[1]
        ratio = max(ratios) if mode == "border" else min(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def held(self, height: int, width: int) -> int:
        return resizing_bytes((height, width), self.largest_size(height, width), self.nominal_size())

    def nominal_size(self) -> tuple[int, int]:
        _, height, width = self.config["input_size"]
        return height, width

    def _scaled(self) -> list[int]:
        """Return the size that the image is resized to before the crop."""
        return [math.floor(size / self.config["crop_pct"]) for size in self.nominal_size()]
