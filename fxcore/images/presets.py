"""torchvision's preprocessing presets: the classes, and presets made from named parameters.

The classes are obtained from published weights, because ``torchvision.transforms._presets``, which defines them, is
private.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torchvision.models import ResNet18_Weights
from torchvision.models.segmentation import FCN_ResNet50_Weights
from torchvision.models.video import R3D_18_Weights
from torchvision.transforms import InterpolationMode

from fxcore.errors import BadArgument

ImageClassification: Any = type(ResNet18_Weights.IMAGENET1K_V1.transforms())
SemanticSegmentation: Any = type(FCN_ResNet50_Weights.COCO_WITH_VOC_LABELS_V1.transforms())
VideoClassification: Any = type(R3D_18_Weights.KINETICS400_V1.transforms())

PARAMETERS = ("resize_size", "crop_size", "mean", "std", "interpolation", "antialias")

PIL_MODES = frozenset((InterpolationMode.BOX, InterpolationMode.HAMMING, InterpolationMode.LANCZOS))
"""Interpolation modes in which torchvision's presets resize PIL images but not tensors."""

_INTERPOLATIONS = {mode.value: mode for mode in InterpolationMode}
_MAX_SIDE = 4096
_MAX_CHANNEL = 1e6
"""Maximum of means and standard deviations, and of the inverse of the latter; pixels are in [0, 1]."""
_DEFAULT_CROP, _DEFAULT_RESIZE, _DEFAULT_CLIP = 224, 256, 112


def preset_factory(input: Literal["image", "video"], parameters: Mapping[str, Any]) -> Callable[[], Any]:
    """Check ``parameters`` and return a function that makes a preset with them.

    Args:
        input: kind of one row of the model's input.
        parameters: values by name, see :data:`PARAMETERS`; missing ones have torchvision's defaults. Sizes are in
            pixels, one number or ``[height, width]``; ``mean`` and ``std`` are for values in [0, 1], one number per
            channel or one for all. Images are not cropped if only ``resize_size`` is given.

    Raises:
        BadArgument: a parameter is unknown, or of the wrong type or size.

    >>> preset = preset_factory("image", {"resize_size": 232, "crop_size": 224, "interpolation": "bicubic"})()
    >>> preset.resize_size, preset.crop_size, preset.interpolation.value
    ([232], [224], 'bicubic')
    """
    for name in parameters:
        if name not in PARAMETERS:
            raise BadArgument(f"preprocessing has no {name!r}; it has {', '.join(PARAMETERS)}")
    rest = dict(parameters)
    resize = _sizes("resize_size", rest.pop("resize_size", None))
    crop = _sizes("crop_size", rest.pop("crop_size", None))
    for name in ("mean", "std"):
        _check_channels(name, rest.get(name, [0.5, 0.5, 0.5]))
        if len(rest.get(name, [])) == 1:
            rest[name] = rest[name] * 3
    if not isinstance(rest.get("antialias", True), bool):
        raise BadArgument(f"preprocessing: antialias is true or false, not {rest['antialias']!r}")
    if "interpolation" in rest:
        if rest["interpolation"] not in tuple(_INTERPOLATIONS):  # it may have no hash
            raise BadArgument(f"preprocessing: interpolation is one of {', '.join(_INTERPOLATIONS)}")
        rest["interpolation"] = _INTERPOLATIONS[rest["interpolation"]]
        if input == "video" and rest["interpolation"] in PIL_MODES:  # clips are tensors
            raise BadArgument(f"preprocessing: {rest['interpolation'].value} is not an interpolation of clips")
    if input == "video":
        rest.pop("antialias", None)  # torchvision's preset for clips has no such parameter
        return functools.partial(_video_preset, resize, crop, rest)
    if crop is not None and crop[0] != crop[-1]:
        raise BadArgument("preprocessing: crop_size of images is one number, the side of a square")
    return functools.partial(_image_preset, resize, crop, rest)


def _sizes(name: str, value: Any) -> list[int] | None:
    """Return ``224`` or ``[224, 320]`` as a list."""
    if value is None:
        return None
    sizes = value if isinstance(value, list) else [value]
    if not 1 <= len(sizes) <= 2 or not all(type(size) is int and 0 < size <= _MAX_SIDE for size in sizes):
        raise BadArgument(f"preprocessing: {name} is a number of pixels, or [height, width], not {value!r}")
    return sizes


def _check_channels(name: str, values: Any) -> None:
    if (
        not isinstance(values, list)
        or len(values) not in (1, 3)
        or not all(isinstance(v, (int, float)) and abs(v) <= _MAX_CHANNEL for v in values)
    ):
        raise BadArgument(f"preprocessing: {name} is a list of three numbers or of one, not {values!r}")
    if name == "std" and not all(abs(v) >= 1 / _MAX_CHANNEL for v in values):  # values are divided by it
        raise BadArgument(f"preprocessing: std is not zero, as in {values!r}")


def _image_preset(resize: list[int] | None, crop: list[int] | None, rest: Mapping[str, Any]) -> Any:
    if crop is None and resize is not None:
        preset: Any = SemanticSegmentation(resize_size=None, **rest)  # resizes, and does not crop
        preset.resize_size = list(resize)
    else:
        preset = ImageClassification(crop_size=crop[0] if crop else _DEFAULT_CROP, **rest)
        preset.resize_size = list(resize or crop or [_DEFAULT_RESIZE])
    return preset


def _video_preset(resize: list[int] | None, crop: list[int] | None, rest: Mapping[str, Any]) -> Any:
    clip = crop or resize or [_DEFAULT_CLIP]
    return VideoClassification(crop_size=(clip[0], clip[-1]), resize_size=tuple(resize or clip), **rest)
