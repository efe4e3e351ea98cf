"""torchvision's models, read from its registry."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torchvision.models as tv
from torch import nn
from torchvision.models import WeightsEnum

from fxcore.errors import UnknownWeights
from fxcore.images.detector_preprocessing import DetectorPreprocessing
from fxcore.images.preprocessing import (
    FlowPreprocessing,
    ImagePreprocessing,
    Preprocessing,
    VideoPreprocessing,
)
from fxcore.images.sizes import ImageSize
from fxcore.models import torch_ao
from fxcore.models.entry import RANDOM, ModelEntry, Task, WeightsInfo
from fxcore.models.sized_vit import resampled, sized
from fxcore.models.state_dicts import StateDict, misfit, read_cached
from fxcore.models.weightless import building, weightless

# torchvision's builders change these arguments when they load weights (`_ovewrite_named_param`); a model that is built
# first and loads the same weights later needs the same arguments. A test compares each model's parameter count with the
# one that its weights declare.
_AUXILIARY_HEADS = {  # whether the heads are kept after weights are loaded
    "googlenet": False,
    "inception_v3": True,
    "quantized_googlenet": False,
    "quantized_inception_v3": False,
}

# Detectors whose published weights were trained with frozen batch norms with eps 0; torchvision's builders set eps
# after loading (`overwrite_eps`). Built without weights they have ordinary batch norms, equivalent in eval mode.
_ZERO_EPS = {"fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn", "retinanet_resnet50_fpn"}


_MAXVIT = "maxvit_t"
"""MaxViT; like ViTs, it is built for a single input size."""

_MAXVIT_WINDOW = 7
"""Side of a MaxViT window in positions; feature maps are split into whole windows."""

_POSITIONS = "encoder.pos_embedding"
"""The parameter of ViTs that depends on the size."""


@dataclass(frozen=True)
class TorchvisionEntry(ModelEntry):
    """A model of torchvision.

    Attributes:
        transforms: by weights name, a callable that returns the preprocessing.
        meta: by weights name, torchvision's ``meta``.
    """

    transforms: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    meta: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def is_quantized(self, weights: str) -> bool:
        return self.task == "quantization" and weights in self.published

    @property
    def one_size(self) -> bool:
        return self.name == _MAXVIT or (self.name.startswith("vit_") and self.default_weights is not None)

    @property
    def multiple(self) -> int:
        return _MAXVIT_WINDOW if self.name == _MAXVIT else 1

    def resampled(self, state: StateDict) -> StateDict:
        if self.input_size is None or _POSITIONS not in state:
            return state
        patch = state["conv_proj.weight"].shape[-1]
        height, width = (side // patch for side in self.input_size)
        return {**state, _POSITIONS: resampled(state[_POSITIONS], height, width)}

    def preprocessing(self, weights: str = "DEFAULT", image_size: ImageSize | None = None) -> Preprocessing:
        """Return the preprocessing of ``weights``, adapted to an input of ``image_size`` if given.

        Raises:
            UnknownWeights: the model has no published weights, and so no preprocessing.
        """
        if self.task == "detection":
            return DetectorPreprocessing(copy.deepcopy(_weightless_detector(self.name).transform), image_size)
        if self.task == "optical_flow":
            return FlowPreprocessing(image_size)
        name = weights if weights in self.published else self.default_weights
        if name is None:
            raise UnknownWeights(
                f"{self.name} has no published weights, and so no preprocessing for images", available=[]
            )
        kind = VideoPreprocessing if self.task == "video" else ImagePreprocessing
        return kind(self.transforms[name](), image_size)

    def load_published(self, weights: str) -> nn.Module:
        info = self.published[weights]
        info.download()
        state = read_cached(info.file)
        if self.is_quantized(weights):
            # torchvision's builder loads them, because order matters: MobileNetV3's are loaded before conversion.
            try:
                with torch_ao.same_engine(), building():
                    return self.builder(weights=tv.get_model_weights(self.name)[weights], quantize=True).eval()
            except (RuntimeError, KeyError) as error:
                raise misfit(self.name, info.file, str(error)) from error
        model = self.filled(weights, state, info.file)
        if weights == "COCO_V1" and self.name in _ZERO_EPS:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eps = 0.0
        return model

    def build(self, weights: str = RANDOM) -> nn.Module:
        with torch_ao.same_engine() if self.is_quantized(weights) else contextlib.nullcontext():
            return super().build(weights)

    def build_weightless(self, weights: str = RANDOM) -> nn.Module:
        """Build like :meth:`build`, but with parameters and batch statistics uninitialised on the meta device.

        int8 models are built on the CPU, because packed parameters cannot be on the meta device.
        """
        if self.is_quantized(weights):
            return self.build(weights)
        structure = self._structure(weights)
        if self.name in _AUXILIARY_HEADS:
            structure["init_weights"] = False  # initialisation imports scipy, which takes seconds
        with building(), weightless():
            built = self.builder(weights=None, **structure).eval()
            if self.input_size is not None and isinstance(built, tv.VisionTransformer):
                built = sized(built, *self.input_size)
            return built

    def _structure(self, weights: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if "weights_backbone" in inspect.signature(self.builder).parameters:
            arguments["weights_backbone"] = None  # the default would be downloaded
        if self.name.startswith("vit_") and self.default_weights is not None:
            # A ViT asserts its input size; without weights, use the size of the default preprocessing.
            sized = weights if weights in self.published else self.default_weights
            arguments["image_size"] = self.meta[sized]["min_size"][0]
        if self.name == _MAXVIT and self.input_size is not None:
            arguments["input_size"] = self.input_size
        if weights not in self.published:
            return arguments
        meta = self.meta[weights]
        if meta.get("categories"):
            arguments["num_classes"] = len(meta["categories"])
        if "keypoint_names" in meta:
            arguments["num_keypoints"] = len(meta["keypoint_names"])
        if self.task == "segmentation" and "aux_loss" in inspect.signature(self.builder).parameters:
            arguments["aux_loss"] = True
        if self.name in _AUXILIARY_HEADS:
            kept = _AUXILIARY_HEADS[self.name]
            arguments |= {"transform_input": True, "aux_logits": kept, "init_weights": False}
        if self.is_quantized(weights):
            arguments["quantize"] = True
        return arguments


@functools.cache
def _weightless_detector(name: str) -> Any:
    return torchvision_models()[name].build_weightless()


def _entry(name: str) -> TorchvisionEntry:
    builder = tv.get_model_builder(name)
    enum: type[WeightsEnum] = tv.get_model_weights(name)
    members = {w.name: w for w in enum}
    package = builder.__module__.split(".")
    task: Task = next((task for task in get_args(Task) if task in package), "classification")
    default = getattr(enum, "DEFAULT", None)
    return TorchvisionEntry(
        name=name,
        task=task,
        builder=builder,
        published={
            n: WeightsInfo(
                name=n,
                url=w.url,
                num_params=w.meta["num_params"],
                metrics=w.meta.get("_metrics", {}),
                categories=tuple(w.meta.get("categories") or ()),
            )
            for n, w in members.items()
        },
        default_weights=default.name if default is not None else None,
        transforms={n: w.transforms for n, w in members.items()},
        meta={n: w.meta for n, w in members.items()},
    )


@functools.cache
def torchvision_models() -> dict[str, ModelEntry]:
    """Return all of torchvision's models, by name, sorted."""
    return {name: _entry(name) for name in tv.list_models()}
