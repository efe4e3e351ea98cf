"""Users' own models: their descriptions, and their entries in the catalog.

Only an operator can name a builder to call; no request can. :mod:`fxcore.models.descriptions` reads the descriptions.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fxcore.copies import narrowed, shared_copy
from fxcore.errors import BadArgument, FxError, NotTraceable, summarize
from fxcore.images.channels import OtherChannels
from fxcore.images.preprocessing import ImagePreprocessing, Preprocessing, VideoPreprocessing
from fxcore.images.presets import ImageClassification, preset_factory
from fxcore.images.sizes import ImageSize
from fxcore.models.entry import FileWeights, ModelEntry, Task
from fxcore.models.packaged_models import packaged_models
from fxcore.models.references import holds_tensors, uncopied_reference
from fxcore.models.state_dicts import StateDict, filled, read_file
from fxcore.models.timm_models import PREFIX
from fxcore.models.torchvision_models import torchvision_models
from fxcore.wrappers import check_python, unwrap_parts, unwrapped

BUILT = "builder"
"""Name of the weights of a model without a weights file, which are the builder's own."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INPUTS: dict[str, tuple[Task, ...]] = {"image": ("classification", "segmentation"), "video": ("video",)}


class BadUserModel(FxError):
    """The description of the model ``name`` is invalid."""


@dataclass(frozen=True)
class UserModel:
    """The description of a user's model.

    Attributes:
        builder: callable that returns the model; called with ``arguments`` by name. If it returns the same module each
            time, that module is neither changed nor moved, and its weights are shared; functions in it, such as hooks,
            must not refer to it.
        weights: state dict file (safetensors, or torch's format with only tensors); None for the builder's own weights.
        preprocessing: parameters of :func:`fxcore.images.presets.preset_factory`.
        input: ``image`` or ``video``, the kind of one input row.
        task: ``classification`` or ``segmentation`` for images; ``video`` for videos.
        leaf_modules, leaf_functions: modules and functions not traced into; see :func:`fxcore.tracing.tracer.trace`.
        concrete_args: arguments of forward with a fixed value. The inputs are the arguments without a value here or a
            default; if there are none, the first argument.
        batch: whether several images may be computed at once; False if values depend on the other images in a batch.

    Raises:
        BadUserModel: an attribute has the wrong type.

    >>> from torchvision.models import squeezenet1_1
    >>> model = UserModel(squeezenet1_1, {"num_classes": 7}, preprocessing={"crop_size": 64})
    >>> entry = user_entry("seven", model)
    >>> entry.weights_info("DEFAULT").num_params, entry.preprocessing().nominal_size()
    (726087, (64, 64))
    """

    builder: Callable[..., nn.Module]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    input: str = "image"
    task: str | None = None
    leaf_modules: Sequence[type[nn.Module] | str] | str = ()
    leaf_functions: Sequence[Callable[..., Any]] = ()
    concrete_args: Mapping[str, Any] = field(default_factory=dict)
    batch: bool = True

    def __post_init__(self) -> None:
        if not callable(self.builder):
            raise BadUserModel(f"builder is a function that returns an nn.Module, not {self.builder!r:.100}")
        for name in ("arguments", "preprocessing", "concrete_args"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise BadUserModel(f"{name} is a dictionary by name, not {value!r:.100}")
        if not isinstance(self.batch, bool):
            raise BadUserModel(f"batch is true or false, not {self.batch!r:.100}")
        if not isinstance(self.weights, Path | None):
            raise BadUserModel(f"weights is a pathlib.Path or None, not {self.weights!r:.100}")
        if isinstance(self.leaf_functions, str) or not all(map(callable, self._listed("leaf_functions"))):
            raise BadUserModel(f"leaf_functions is a list of functions, not {self.leaf_functions!r:.100}")
        if not all(isinstance(leaf, (str, type)) for leaf in self._listed("leaf_modules")):
            raise BadUserModel(
                f"leaf_modules is a list of classes, paths and patterns, or 'auto', not {self.leaf_modules!r:.100}"
            )

    def _listed(self, name: str) -> Sequence[Any]:
        value = getattr(self, name)
        return value if isinstance(value, Sequence) else [None]


@dataclass(frozen=True)
class UserEntry(ModelEntry):
    """A user's model in the catalog.

    Attributes:
        preset: returns the preset of the preprocessing.
        leaves, functions: modules and functions that are not traced into.
    """

    preset: Callable[[], Any] = ImageClassification
    leaves: tuple[type[nn.Module] | str, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()

    def preprocessing(self, weights: str = "DEFAULT", image_size: ImageSize | None = None) -> Preprocessing:
        if self.task == "video":
            return VideoPreprocessing(self.preset(), image_size)
        images = ImagePreprocessing(self.preset(), image_size)
        return images if self.channels == 3 else OtherChannels(images, self.channels)

    def load_published(self, weights: str) -> nn.Module:
        info = self.published[weights]
        file = info.path if isinstance(info, FileWeights) else None  # None for the builder's own weights
        return self.build() if file is None else self.filled(weights, read_file(file.name, file.parent), file)

    def filled(self, structure: str, state: StateDict, file: Path) -> nn.Module:
        model = self.build_weightless(structure)
        if not holds_tensors(model):
            return filled(self.name, model, state, file, unread=())
        # Tensors held apart, such as views of buffers, see only values that are copied into the model's own tensors.
        model = self.build(structure)
        if not (isinstance(self.builder, _Builder) and self.builder.makes_new):
            # Its tensors are shared with the module that the builder returns each time.
            try:
                model = copy.deepcopy(model)
            except Exception as error:
                raise _uncopied(summarize(error)) from error
        return filled(self.name, model, state, file, unread=(), assign=False)

    def build_weightless(self, weights: str = "random") -> nn.Module:
        """Build on the meta device, or with weights if the builder fails without them, e.g. as it reads parameters."""
        try:
            model = super().build_weightless(weights)
            # torch ignores that a parametrisation cannot be initialised without weights, and fails when it is read.
            for part in filter(parametrize.is_parametrized, model.modules()):
                for name in part.parametrizations:  # type: ignore[union-attr]
                    getattr(part, name)
            return model
        except Exception:
            return self.build(weights)

    def leaf_modules(self) -> Sequence[type[nn.Module] | str]:
        return self.leaves

    def leaf_functions(self) -> Sequence[Callable[..., Any]]:
        return self.functions


def as_bad_model(name: str, error: BaseException) -> BadUserModel:
    """Convert ``error`` to a :class:`BadUserModel` for the model ``name``."""
    return BadUserModel(
        f"model {name!r}: {error.detail if isinstance(error, FxError) else summarize(error)}", name=name
    )


def user_entry(name: str, model: UserModel) -> UserEntry:
    """Build ``model`` once, without weights, and return its entry for the catalog.

    Raises:
        BadUserModel: the description is invalid, or the builder fails.
    """
    if not _NAME.fullmatch(name):
        raise BadUserModel("a name is at most 128 letters, digits, '.', '_' and '-', and begins with a letter or digit")
    if name in torchvision_models() or name in packaged_models():
        raise BadUserModel("there is already a model of this name; choose another")
    if name.startswith(PREFIX):
        raise BadUserModel(f"names that begin with {PREFIX!r} are timm's; choose another")
    if model.input not in tuple(_INPUTS):  # it may have no hash
        raise BadUserModel(f"input is {' or '.join(_INPUTS)}, not {model.input!r}")
    tasks = _INPUTS[model.input]
    task = next((t for t in tasks if t == (model.task or tasks[0])), None)
    if task is None:
        raise BadUserModel(f"task is {' or '.join(tasks)} for input {model.input!r}, not {model.task!r}")
    if model.weights is not None and not model.weights.is_file():
        raise BadUserModel(f"there is no weights file {model.weights}")
    try:
        preset = preset_factory("video" if model.input == "video" else "image", model.preprocessing)
    except BadArgument as error:
        raise BadUserModel(error.detail) from error
    weights = model.weights.name if model.weights is not None else BUILT
    leaves = (model.leaf_modules,) if isinstance(model.leaf_modules, str) else tuple(model.leaf_modules)
    entry = UserEntry(
        name,
        task,
        _Builder(model),
        default_weights=weights,
        preset=preset,
        leaves=leaves,
        functions=tuple(model.leaf_functions),
        batch=model.batch,
    )
    try:
        built = entry.build_weightless()
    except BadUserModel:
        raise
    except Exception as error:
        raise BadUserModel(f"its builder failed: {summarize(error)}") from error
    for path, value in (*built.named_parameters(), *built.named_buffers()):
        if value.layout != torch.strided:
            raise BadUserModel(f"{path} is a sparse tensor: make it dense, with to_dense()")
    params = sum(parameter.numel() for parameter in built.parameters())
    entry = replace(entry, dtype=_dtype(built))
    if task != "video":
        entry = replace(entry, channels=_channels(built, entry.preprocessing().nominal_size(), entry.dtype))
    info = FileWeights(weights, "", params, {}, (), path=model.weights)
    return replace(entry, published={weights: info})


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, or float32 if there is none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _channels(model: nn.Module, size: tuple[int, int], dtype: torch.dtype) -> int:
    """Return the number of image channels that a weightless ``model`` accepts.

    This is three if the model runs with three; otherwise the input channels of the first convolution, or of a linear
    layer over all values of an image. A model that runs with neither is judged by its layers.
    """
    convolutions = [part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d)]
    linear = next((part.in_features for part in model.modules() if isinstance(part, nn.Linear)), 0)
    per_channel = size[0] * size[1]
    first = convolutions[0] if convolutions else linear // per_channel if linear % per_channel == 0 else 3
    if first in (0, 3) or _runs(model, (1, 3, *size), dtype):
        return 3
    if _runs(model, (1, first, *size), dtype):
        return first
    return first if 3 not in convolutions and (convolutions or linear == per_channel) else 3


def _runs(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether ``model`` accepts an input of ``shape``; also False if it cannot run on the meta device."""
    try:
        # Its parameters have no memory, but its buffers have.
        weightless = copy.deepcopy(model).to("meta")
        with torch.no_grad():
            weightless(torch.zeros(shape, dtype=dtype, device="meta"))
    except Exception:  # users' models raise all kinds
        return False
    return True


class _Builder:
    """Call the builder of ``model`` and prepare what it returns to be moved, cast and frozen.

    A module that may be in use elsewhere is copied. A new one is not, since functions in it, such as hooks, may refer
    to it, and those of a copy would refer to the original.

    Attributes:
        makes_new: whether each call returns a new module; None before the first.
    """

    def __init__(self, model: UserModel) -> None:
        self._model = model
        self.makes_new: bool | None = None

    def __call__(self, weights: None = None) -> nn.Module:
        """Return a private module; entries pass ``weights`` since torchvision's builders require it."""
        built = self._called()
        if self.makes_new is None:
            self.makes_new = not _share_parts(built, self._called())
        private = built if self.makes_new else _copied(built)
        unwrap_parts(private)
        return _narrow_to_inputs(private, self._model.concrete_args)

    def _called(self) -> nn.Module:
        try:
            built = self._model.builder(**self._model.arguments)
        except SystemExit as error:
            raise BadUserModel(
                f"its builder ends the process ({summarize(error)}), as argparse does for a command line that it does "
                "not know; use a builder that takes its settings as arguments"
            ) from error
        if not isinstance(built, nn.Module):
            raise BadUserModel(f"its builder returned {type(built).__name__}, not an nn.Module")
        try:
            check_python(built)
        except NotTraceable as error:
            raise BadUserModel(f"its builder must return a model that can be traced: {error.detail}") from error
        return unwrapped(built)


def _share_parts(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have a module, parameter or buffer in common."""
    known = {id(part): part for part in (*one.modules(), *one.parameters(), *one.buffers())}
    return any(id(part) in known for part in (*other.modules(), *other.parameters(), *other.buffers()))


def _copied(model: nn.Module) -> nn.Module:
    """Copy ``model``; the copy shares the storages of its tensors, and can be moved, cast and frozen.

    Raises:
        BadUserModel: ``model`` cannot be copied rightly.
    """
    if (reference := uncopied_reference(model)) is not None:
        raise _uncopied(f"{reference} refers to the original")
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise _uncopied(f"{path or 'it'} is TorchScript, whose copies cannot be moved")
    try:
        return shared_copy(model, own_parameters=True)
    except Exception as error:
        raise _uncopied(summarize(error)) from error


def _uncopied(reason: str) -> BadUserModel:
    return BadUserModel(
        f"its builder returns the same module each time, or parts of it, which cannot be copied ({reason}); use a "
        "builder that makes a new one"
    )


def _narrow_to_inputs(model: nn.Module, fixed: Mapping[str, Any]) -> nn.Module:
    """Reduce the arguments of forward to the inputs: those without a default that are not ``fixed``, or if there are
    none, the first."""
    parameters = [*inspect.signature(type(model).forward).parameters.values()][1:]
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind not in stars]
    for name in fixed:
        if name not in names and not takes_any:
            raise BadUserModel(f"concrete_args: its forward takes {', '.join(names) or 'nothing'}, but not {name!r}")
    free = [p for p in parameters if p.kind not in stars and p.name not in fixed]
    needed = [p.name for p in free if p.default is p.empty] or [p.name for p in free[:1]]
    if not needed:
        raise BadUserModel("its forward has no argument left to be its input; fix fewer in concrete_args")
    # An argument with a default would have one in the graph too, where it is not an input.
    simple = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    return model if simple and len(needed) == len(parameters) else narrowed(model, needed, fixed, copied=False)
