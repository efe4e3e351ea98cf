"""Entries of the catalog: models that can be built by name, with their weights and preprocessing.

The model's library builds it, with weights, or *weightless*: parameters take no memory, and nothing is downloaded.
Each source of models has a subclass of :class:`ModelEntry`.
"""

from __future__ import annotations

import difflib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlparse

import torch
from torch import nn

from fxcore.errors import UnknownWeights
from fxcore.images.preprocessing import Preprocessing
from fxcore.images.sizes import ImageSize
from fxcore.models.downloads import download
from fxcore.models.state_dicts import FILE_PREFIX, StateDict, filled
from fxcore.models.weightless import building, weightless

Task = Literal["classification", "quantization", "segmentation", "detection", "video", "optical_flow"]

RANDOM = "random"

_LISTED = 6
"""Maximum number of names that the error for unknown weights lists; beyond that it suggests similar names."""


@dataclass(frozen=True)
class WeightsInfo:
    """One set of published weights of a model.

    Attributes:
        name: the enum member's name, such as ``IMAGENET1K_V1``.
        url: download address.
        num_params: number of parameters of the model; None if not published.
        metrics: published accuracies by data set.
        categories: class names in output order; empty if the weights have no classes or their names are unknown.
        classes: number of classes, if their names are unknown.

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
        """Number of classes; 0 for weights without a classifier."""
        return len(self.categories) or self.classes

    @property
    def file(self) -> Path:
        """Path of the file in torch.hub's cache."""
        return Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(urlparse(self.url).path)

    @property
    def cached(self) -> bool:
        """Whether the file is in the cache."""
        return self.file.is_file()

    @property
    def revision(self) -> str | None:
        """Revision of the cached file; None if there are no revisions or the file is not cached."""
        return None

    def download(self) -> None:
        """Download the file to :attr:`file` unless it is cached.

        Raises:
            WeightsUnavailable: the file cannot be downloaded.
        """
        if not self.cached:
            download(self.url, self.file)


@dataclass(frozen=True)
class FileWeights(WeightsInfo):
    """Weights from an operator's file or an installed package, or the builder's own.

    Attributes:
        path: the file; None for the builder's own weights.
    """

    path: Path | None = None

    @property
    def file(self) -> Path:
        return self.path or Path()

    @property
    def cached(self) -> bool:
        return self.path is None or self.path.is_file()

    def download(self) -> None:
        """Do nothing; reading a missing file raises an error later."""


@dataclass(frozen=True)
class FeatureMap:
    """A feature map that a model declares.

    Attributes:
        module: path of the module that computes it.
        channels: number of channels.
        stride: input pixels per position.
    """

    module: str
    channels: int
    stride: int


@dataclass(frozen=True)
class ModelEntry(ABC):
    """A model that can be built by name.

    Attributes:
        name: unique in the catalog.
        task: the task that the model was made for.
        builder: ``builder(weights=None, **kwargs) -> nn.Module``.
        published: published weights by name, in their library's order.
        default_weights: the name that ``DEFAULT`` stands for; None if there are no published weights.
        channels: number of input channels.
        dtype: dtype of the parameters as built.
        batch: whether several images may be computed at once; False if values depend on the other images in a batch.
        apart: names of nodes whose rows do not belong to single images, although their number suggests it.
        input_size: height and width of an entry made by :meth:`at`; None for the size of the weights.

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
    channels: int = 3
    dtype: torch.dtype = torch.float32
    batch: bool = True
    apart: frozenset[str] = frozenset()
    input_size: tuple[int, int] | None = None

    @property
    def multiple(self) -> int:
        """A number that each side of the input must be a multiple of, in addition to the strides of the maps."""
        return 1

    @property
    def one_size(self) -> bool:
        """Whether the model is built for a single input size and accepts no other, like most vision transformers."""
        return False

    def at(self, height: int, width: int) -> Self:
        """Return an entry for the same model built for another size, if it is :attr:`one_size`."""
        return replace(self, input_size=(height, width))

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the published weights."""
        return tuple(self.published)

    def weights_info(self, name: str) -> WeightsInfo:
        """Return the published weights called ``name`` (``DEFAULT`` allowed).

        Raises:
            UnknownWeights: the model has no such weights.
        """
        return self.published[self._published_name(name)]

    def canonical_weights(self, asked: str) -> str:
        """Resolve ``DEFAULT``, and check that ``asked`` is a published name, ``random``, or ``file:NAME``.

        NAME must be the name of a file, not a path; whether the file exists is not checked.

        Raises:
            UnknownWeights: ``asked`` is none of these.
        """
        file = asked.removeprefix(FILE_PREFIX)
        if asked == RANDOM or (file != asked and file == Path(file).name and file not in ("", "..")):
            return asked
        return self._published_name(asked)

    def structure(self, asked: str = "DEFAULT") -> str:
        """Return the weights whose structure a model with the weights ``asked`` has.

        These are published weights, or ``random`` for the builder's default structure. ``DEFAULT`` without published
        weights also means ``random``.

        Raises:
            UnknownWeights: the model has no such weights.

        >>> from fxcore import get_model
        >>> get_model("googlenet").structure(), get_model("googlenet").structure("file:mine.pth")
        ('IMAGENET1K_V1', 'random')
        """
        if asked == "DEFAULT" and self.default_weights is None:
            return RANDOM
        weights = self.canonical_weights(asked)
        return weights if weights in self.published else RANDOM

    def is_quantized(self, weights: str) -> bool:
        """Return whether ``weights`` are int8 weights, for which the model has different modules than in float."""
        return False

    @abstractmethod
    def preprocessing(self, weights: str = "DEFAULT", image_size: ImageSize | None = None) -> Preprocessing:
        """Return the preprocessing of ``weights``, adapted to an input of ``image_size`` if given."""

    @abstractmethod
    def load_published(self, weights: str) -> nn.Module:
        """Build a model and load published ``weights`` (a canonical name), downloading them if they are not cached.

        Raises:
            WeightsUnavailable: the file is missing and cannot be downloaded, is damaged, or does not match the model.
        """

    def sized(self, model: nn.Module, structure: str) -> nn.Module:
        """Build this entry, made by :meth:`at`, with the weights of ``model``, in eval mode.

        Args:
            model: the same model in its usual size. Its parameters and buffers are shared, except those that depend on
                the size, which are resampled.
            structure: the weights that determine the structure of ``model``.

        Raises:
            Exception: whatever the library raises for a size that it cannot build.
        """
        built = self.build_weightless(structure)
        built.load_state_dict(self.resampled(model.state_dict()), assign=True)
        return built

    def resampled(self, state: StateDict) -> StateDict:
        """Resample ``state`` from the usual size to :attr:`input_size`."""
        return state

    def filled(self, structure: str, state: StateDict, file: Path) -> nn.Module:
        """Build a model with the structure of the weights ``structure``, and load ``state``, the contents of ``file``.

        Raises:
            WeightsUnavailable: ``state`` does not match the model.
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
        """Build a model with the structure of ``weights``, in eval mode, with the library's random initialisation.

        The seed is 0; the global random generator is left unchanged.

        Args:
            weights: a canonical name; the weights themselves are not loaded.
        """
        with building():
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the accelerators' generators too
            return self.builder(weights=None, **self._structure(weights)).eval()

    def build_weightless(self, weights: str = RANDOM) -> nn.Module:
        """Build like :meth:`build`, but with parameters and batch statistics uninitialised on the meta device."""
        with building(), weightless():
            return self.builder(weights=None, **self._structure(weights)).eval()

    def leaf_modules(self) -> Sequence[type[nn.Module] | str]:
        """Return leaf modules for :func:`fxcore.tracing.tracer.trace`; with no class, torchvision's defaults apply."""
        return ()

    def leaf_functions(self) -> Sequence[Callable[..., Any]]:
        """Return leaf functions for :func:`fxcore.tracing.tracer.trace`."""
        return ()

    def feature_maps(self, model: nn.Module) -> Sequence[FeatureMap]:
        """Return the feature maps that ``model`` declares."""
        return ()

    def _structure(self, weights: str) -> dict[str, Any]:
        """Return the builder arguments for the structure of ``weights``."""
        return {}
