"""Which models exist, which weights they have, and how each wants to be built.

Everything here is read from torchvision's own registry, beside which :mod:`fxcore.models.user_models` puts users' own
models. Building is done by torchvision's own builders; what this module adds is *weightless* building, where no
parameter takes memory and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import torch
import torchvision.models as tv
from torch import nn
from torchvision.models import WeightsEnum

from fxcore import torch_ao
from fxcore.errors import FxError, UnknownModel, UnknownWeights, Unsupported
from fxcore.images.preprocessing import (
    DetectorPreprocessing,
    FlowPreprocessing,
    ImagePreprocessing,
    Preprocessing,
    VideoPreprocessing,
)

Task = Literal["classification", "quantization", "segmentation", "detection", "video", "optical_flow"]

RANDOM = "random"
FILE_PREFIX = "file:"

_SUBMODULE_TASKS: dict[str, Task] = {
    "quantization": "quantization",
    "segmentation": "segmentation",
    "detection": "detection",
    "video": "video",
    "optical_flow": "optical_flow",
}

# torchvision's builders set these arguments themselves when they are given weights (`_ovewrite_named_param`); a model
# built to receive the same weights later needs the same. A test holds every model's parameter count against the
# count that its weights declare.
_AUXILIARY_HEADS = {  # are they kept once weights are loaded?
    "googlenet": False,
    "inception_v3": True,
    "quantized_googlenet": False,
    "quantized_inception_v3": False,
}

# One lock for everything that patches torch.nn.Module or seeds the global random generator.
_BUILD_LOCK = threading.RLock()


@dataclass(frozen=True)
class WeightsInfo:
    """One set of published weights of a model.

    Attributes:
        name: the enum member's name, such as ``IMAGENET1K_V1``.
        url: where torchvision downloads them from.
        num_params: number of parameters of the model that they are for.
        metrics: the published accuracies, by data set.
        categories: names of the classes, in order of the outputs; empty where there are none.

    >>> info = get_model("resnet18").weights_info("DEFAULT")
    >>> info.name, info.num_params, info.categories[281]
    ('IMAGENET1K_V1', 11689512, 'tabby')
    """

    name: str
    url: str
    num_params: int
    metrics: Mapping[str, Any]
    categories: tuple[str, ...]

    @property
    def file(self) -> Path:
        """Where torch.hub keeps the file once it has been downloaded."""
        return Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(urlparse(self.url).path)

    @property
    def cached(self) -> bool:
        """Whether the file is on this machine already."""
        return self.file.is_file()


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be built by name.

    Attributes:
        name: the name that requests use.
        task: what the model was made for.
        builder: ``builder(weights=None, **kwargs) -> nn.Module``.
        published: the published weights by name, in the order of the registry.
        default_weights: the name that ``DEFAULT`` stands for, or None where nothing is published.
        transforms: weights name → a callable that makes the preprocessing that was used with those weights.
        meta: weights name → all that torchvision says of those weights.

    >>> entry = get_model("resnet50")
    >>> entry.task, entry.weights, entry.canonical_weights("DEFAULT")
    ('classification', ('IMAGENET1K_V1', 'IMAGENET1K_V2'), 'IMAGENET1K_V2')
    >>> entry.preprocessing("IMAGENET1K_V1").describe()["resize_size"], entry.preprocessing().describe()["resize_size"]
    ([256], [232])
    >>> next(entry.build_weightless().parameters()).device
    device(type='meta')
    """

    name: str
    task: Task
    builder: Callable[..., nn.Module]
    published: Mapping[str, WeightsInfo] = field(default_factory=dict)
    default_weights: str | None = None
    transforms: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    meta: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the published weights."""
        return tuple(self.published)

    def weights_info(self, name: str) -> WeightsInfo:
        """The published weights called ``name`` (``DEFAULT`` allowed).

        Raises:
            UnknownWeights: there are none of that name.
        """
        return self.published[self._published_name(name)]

    def canonical_weights(self, asked: str) -> str:
        """What ``asked`` stands for: a published name, ``random``, or ``file:NAME``.

        Raises:
            UnknownWeights: it stands for nothing.
        """
        if asked == RANDOM or (asked.startswith(FILE_PREFIX) and len(asked) > len(FILE_PREFIX)):
            return asked
        return self._published_name(asked)

    def structure(self, asked: str = "DEFAULT") -> str:
        """The weights that decide the structure of a model with the weights ``asked``: published ones, or ``random``,
        the model as its builder makes it. That is also what ``DEFAULT`` means where nothing is published.

        Raises:
            UnknownWeights: ``asked`` stands for nothing.

        >>> get_model("googlenet").structure(), get_model("googlenet").structure("file:mine.pth")
        ('IMAGENET1K_V1', 'random')
        """
        if asked == "DEFAULT" and self.default_weights is None:
            return RANDOM
        weights = self.canonical_weights(asked)
        return weights if weights in self.published else RANDOM

    def is_quantized(self, weights: str) -> bool:
        """Whether ``weights`` are int8 weights, whose model has other modules than the float model."""
        return self.task == "quantization" and weights in self.published

    def preprocessing(self, weights: str = "DEFAULT", image_size: int | None = None) -> Preprocessing:
        """The preprocessing that goes with ``weights``, for another square input of ``image_size`` pixels if given."""
        if self.task == "detection":
            return DetectorPreprocessing(_detector_transform(self), image_size)
        if self.task == "optical_flow":
            return FlowPreprocessing(image_size)
        name = weights if weights in self.published else self.default_weights
        if name is None:
            raise UnknownWeights(
                f"{self.name} has no published weights, so nothing says how it wants its images", available=[]
            )
        kind = VideoPreprocessing if self.task == "video" else ImagePreprocessing
        return kind(self.transforms[name](), image_size)

    def _published_name(self, asked: str) -> str:
        if asked == "DEFAULT" and self.default_weights is not None:
            return self.default_weights
        if asked in self.published:
            return asked
        available = ["DEFAULT", *self.published] if self.published else []
        choices = ", ".join([*available, RANDOM, FILE_PREFIX + "NAME"])
        raise UnknownWeights(
            f"{self.name} has no weights {asked!r}; ask for one of {choices}",
            available=[*available, RANDOM],
        )

    def build(self, weights: str = RANDOM) -> nn.Module:
        """A model with the structure that ``weights`` need, in eval mode; its parameters hold torchvision's random
        initialisation (seed 0, the global generator left as it was).

        ``weights`` is a canonical name; they are not loaded.
        """
        with _BUILD_LOCK, torch.random.fork_rng(devices=[]), _quiet():
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the accelerators' generators too
            return self.builder(weights=None, **self._structure(weights)).eval()

    def build_int8(self, weights: str) -> nn.Module:
        """An int8 model with ``weights``, whose file is in torch.hub's cache already, loaded.

        torchvision's own builder loads them, since it knows when: MobileNetV3's go in before the model is converted.
        """
        with _BUILD_LOCK, torch.random.fork_rng(devices=[]), _quiet():
            return self.builder(weights=tv.get_model_weights(self.name)[weights], quantize=True).eval()

    def build_weightless(self, weights: str = RANDOM) -> nn.Module:
        """Like :meth:`build` with every parameter and batch statistic on the meta device: no memory, no
        initialisation.

        Int8 models are the exception: packed parameters cannot be on the meta device, so theirs are real.
        """
        if self.is_quantized(weights):
            return self.build(weights)
        structure = self._structure(weights)
        if self.name in _AUXILIARY_HEADS:
            structure["init_weights"] = False  # theirs draws with scipy, which takes seconds
        with _BUILD_LOCK, torch.random.fork_rng(devices=[]), _weightless(), _quiet():
            return self.builder(weights=None, **structure).eval()

    def _structure(self, weights: str) -> dict[str, Any]:
        """Builder arguments for the structure that ``weights`` need."""
        arguments: dict[str, Any] = {}
        if "weights_backbone" in inspect.signature(self.builder).parameters:
            arguments["weights_backbone"] = None  # its default would be downloaded
        if self.name.startswith("vit_") and self.default_weights is not None:
            # A ViT asserts its input size; without weights it gets the size that the default preprocessing makes.
            sized = weights if weights in self.published else self.default_weights
            arguments["image_size"] = self.meta[sized]["min_size"][0]
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


def _detector_transform(entry: ModelEntry) -> Any:
    """A detector's transform is a part of the built model; its sizes and means are the builder's defaults."""
    return copy.deepcopy(_weightless_detector(entry.name).transform)


@functools.cache
def _weightless_detector(name: str) -> Any:
    return get_model(name).build_weightless()


@contextlib.contextmanager
def _weightless() -> Iterator[None]:
    """Put parameters and batch statistics on the meta device as modules register them.

    ``torch.device("meta")`` would do so for every tensor, but RegNet reads a computed tensor back while it is built,
    and index buffers are structure, not weights: MaxViT's become constants of its graph. Batch statistics follow the
    parameters because SSDlite runs its backbone once while it is built. Other threads are not affected.
    """
    thread = threading.get_ident()
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register_parameter(module, name, param)

    def buffer(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        statistic = isinstance(module, nn.modules.batchnorm._NormBase)
        if tensor is not None and statistic and threading.get_ident() == thread:
            tensor = tensor.to("meta")
        register_buffer(module, name, tensor, persistent)

    nn.Module.register_parameter = parameter  # type: ignore[assignment, method-assign]
    nn.Module.register_buffer = buffer  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence builders' warnings about arguments that are left at their defaults on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _entry(name: str) -> ModelEntry:
    builder = tv.get_model_builder(name)
    enum: type[WeightsEnum] = tv.get_model_weights(name)
    members = {w.name: w for w in enum}
    package = builder.__module__.split(".")
    task: Task = next((_SUBMODULE_TASKS[part] for part in package if part in _SUBMODULE_TASKS), "classification")
    default = getattr(enum, "DEFAULT", None)
    return ModelEntry(
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
def _registry() -> dict[str, ModelEntry]:
    return {name: _entry(name) for name in tv.list_models()}


# Users' own models, and errors in the descriptions of others, by name.
_registered: dict[str, ModelEntry] = {}
_refused: dict[str, FxError] = {}


def is_torchvisions(name: str) -> bool:
    """Whether torchvision has a model of this name."""
    return name in _registry()


def register(entries: Mapping[str, ModelEntry | FxError]) -> None:
    """Put ``entries`` into the catalog beside torchvision's models, in place of all that were registered before.

    Args:
        entries: name → the model, or what is wrong with its description.
    """
    global _registered, _refused
    _registered = {name: entry for name, entry in entries.items() if isinstance(entry, ModelEntry)}
    _refused = {name: error for name, error in entries.items() if isinstance(error, FxError)}


def list_models() -> list[ModelEntry]:
    """All models, by name: torchvision's, and users' own (:mod:`fxcore.models.user_models`).

    >>> names = [entry.name for entry in list_models()]
    >>> len(names) >= 121, "resnet18" in names, names == sorted(names)
    (True, True, True)
    """
    entries = [entry for _, entry in sorted({**_registry(), **_registered}.items())]
    return [entry for entry in entries if entry.task != "quantization" or torch_ao.available()]


def get_model(name: str) -> ModelEntry:
    """The model called ``name``.

    Raises:
        UnknownModel: no model has that name; the error suggests the nearest.
        Unsupported: torch can no longer run it.

    >>> get_model("resnet50").default_weights
    'IMAGENET1K_V2'
    """
    registry = {**_registry(), **_registered}
    quantized = registry[name].task == "quantization" if name in registry else name.startswith("quantized_")
    if quantized and not torch_ao.available():
        near = [name.removeprefix("quantized_")]
        detail = f"model {name[:64]!r} is not available here ({torch_ao.MISSING}); available: {near[0][:64]}"
        raise Unsupported(detail, field="model", value=name[:64], available=[n for n in near if n in registry])
    if name in registry:
        return registry[name]
    if name in _refused:
        raise UnknownModel(f"the model {name!r} was described wrongly and is not there", name=name, suggestions=[])
    lower = {known.lower(): known for known in registry}
    suggestions = [lower[near] for near in difflib.get_close_matches(name.lower(), lower, n=5, cutoff=0.5)]
    hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; see the list of models"
    raise UnknownModel(f"there is no model {name!r}{hint}", name=name, suggestions=suggestions)
