"""What a model that can be built by name is: its weights, its preprocessing, and how it is built.

Building is done by the library that has the model; what this module adds is *weightless* building, where no parameter
takes memory and nothing is downloaded. Each source of models has its own kind of entry.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import torch
from torch import nn

from fxcore.errors import UnknownWeights
from fxcore.images.preprocessing import Preprocessing
from fxcore.models.downloads import download
from fxcore.models.state_dicts import FILE_PREFIX, StateDict, filled

Task = Literal["classification", "quantization", "segmentation", "detection", "video", "optical_flow"]

RANDOM = "random"

_LISTED = 6
"""Weights of a model that are all named to who asks for others; of more, the nearest."""

BUILD_LOCK = threading.RLock()
"""One lock for everything that patches torch.nn.Module or seeds the global random generator."""


@dataclass(frozen=True)
class WeightsInfo:
    """One set of published weights of a model.

    Attributes:
        name: the enum member's name, such as ``IMAGENET1K_V1``.
        url: where torchvision downloads them from.
        num_params: number of parameters of the model that they are for, where that is published.
        metrics: the published accuracies, by data set.
        categories: names of the classes, in order of the outputs; empty where there are none, or they are not known.
        classes: how many classes there are, where their names are not known.

    >>> from fxcore import get_model
    >>> info = get_model("resnet18").weights_info("DEFAULT")
    >>> info.name, info.num_params, info.categories[281]
    ('IMAGENET1K_V1', 11689512, 'tabby')
    """

    name: str
    url: str
    num_params: int | None
    metrics: Mapping[str, Any]
    categories: tuple[str, ...]
    classes: int = 0

    @property
    def num_categories(self) -> int:
        """How many classes the weights were trained on; 0 where they have no classifier."""
        return len(self.categories) or self.classes

    @property
    def file(self) -> Path:
        """Where torch.hub keeps the file once it has been downloaded."""
        return Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(urlparse(self.url).path)

    @property
    def cached(self) -> bool:
        """Whether the file is on this machine already."""
        return self.file.is_file()

    @property
    def revision(self) -> str | None:
        """Which of its versions the file on this machine is, where there may be several."""
        return None

    def download(self) -> None:
        """Download the file to where :attr:`file` is.

        Raises:
            WeightsUnavailable: it cannot be downloaded.
        """
        download(self.url, self.file)


@dataclass(frozen=True)
class FeatureMap:
    """What a model itself says of one of its feature maps.

    Attributes:
        module: the path of the module that makes it.
        channels: of the map.
        stride: in pixels of the input.
    """

    module: str
    channels: int
    stride: int


@dataclass(frozen=True)
class ModelEntry(ABC):
    """A model that can be built by name.

    Attributes:
        name: the name that requests use.
        task: what the model was made for.
        builder: ``builder(weights=None, **kwargs) -> nn.Module``.
        published: the published weights by name, in the order of the registry.
        default_weights: the name that ``DEFAULT`` stands for, or None where nothing is published.
        transforms: weights name → a callable that makes the preprocessing that was used with those weights.
        meta: weights name → all that torchvision says of those weights.

    >>> from fxcore import get_model
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

        >>> from fxcore import get_model
        >>> get_model("googlenet").structure(), get_model("googlenet").structure("file:mine.pth")
        ('IMAGENET1K_V1', 'random')
        """
        if asked == "DEFAULT" and self.default_weights is None:
            return RANDOM
        weights = self.canonical_weights(asked)
        return weights if weights in self.published else RANDOM

    def is_quantized(self, weights: str) -> bool:
        """Whether ``weights`` are int8 weights, whose model has other modules than the float model."""
        return False

    @abstractmethod
    def preprocessing(self, weights: str = "DEFAULT", image_size: int | None = None) -> Preprocessing:
        """The preprocessing that goes with ``weights``, for another square input of ``image_size`` pixels if given."""

    @abstractmethod
    def load_published(self, weights: str) -> nn.Module:
        """A model with the published ``weights``, a canonical name, which are downloaded if they are not cached.

        Raises:
            WeightsUnavailable: the file is missing and cannot be downloaded, is damaged, or does not fit.
        """

    def filled(self, structure: str, state: StateDict, file: Path) -> nn.Module:
        """A model with the structure that the weights ``structure`` need, and the tensors of ``state``, read from
        ``file``.

        Raises:
            WeightsUnavailable: they do not fit.
        """
        return filled(self.name, self.build_weightless(structure), state, file)

    def _published_name(self, asked: str) -> str:
        if asked == "DEFAULT" and self.default_weights is not None:
            return self.default_weights
        if asked in self.published:
            return asked
        available = [*(["DEFAULT", *self.published] if self.published else []), RANDOM]
        lower = {known.lower(): known for known in available}
        near = [lower[name] for name in difflib.get_close_matches(asked[:64].lower(), lower, n=3, cutoff=0.6)]
        some = near if len(available) > _LISTED else []
        choices = ", ".join(some or [*available, FILE_PREFIX + "NAME"])
        hint = f"did you mean {choices}?" if some else f"ask for one of {choices}"
        raise UnknownWeights(
            f"{self.name} has no weights {asked!r:.100}; {hint}",
            suggestions=near,
            available=available,
        )

    def build(self, weights: str = RANDOM) -> nn.Module:
        """A model with the structure that ``weights`` need, in eval mode; its parameters hold the library's random
        initialisation (seed 0, the global generator left as it was).

        ``weights`` is a canonical name; they are not loaded.
        """
        with BUILD_LOCK, torch.random.fork_rng(devices=[]), quiet():
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the accelerators' generators too
            return self.builder(weights=None, **self._structure(weights)).eval()

    def build_weightless(self, weights: str = RANDOM) -> nn.Module:
        """Like :meth:`build` with every parameter and batch statistic on the meta device: no memory, no
        initialisation."""
        with BUILD_LOCK, torch.random.fork_rng(devices=[]), weightless(), quiet():
            return self.builder(weights=None, **self._structure(weights)).eval()

    def leaf_modules(self) -> Sequence[type[nn.Module] | str]:
        """Modules that are kept whole when the model is traced, as of :func:`fxcore.tracing.tracer.trace`: classes,
        where none means torchvision's own; paths and patterns; and ``auto``."""
        return ()

    def leaf_functions(self) -> Sequence[Callable[..., Any]]:
        """Functions that are kept whole when the model is traced."""
        return ()

    def feature_maps(self, model: nn.Module) -> Sequence[FeatureMap]:
        """The feature maps that ``model`` says it has; none where it says nothing."""
        return ()

    def _structure(self, weights: str) -> dict[str, Any]:
        """Builder arguments for the structure that ``weights`` need."""
        return {}


@contextlib.contextmanager
def weightless() -> Iterator[None]:
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
def quiet() -> Iterator[None]:
    """Silence builders' warnings about arguments that are left at their defaults on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
