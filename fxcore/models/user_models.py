"""Models of the user's own: an operator's file or an installed package names a builder, never a request.

``models.toml`` has a table for each model::

    [models.tiny]
    builder = "timm:create_model"                     # MODULE:CALLABLE of an installed package, gives an nn.Module
    arguments = { model_name = "resnet10t", num_classes = 10 }
    weights = "tiny.safetensors"                      # a state dict beside this file; without it, what the builder made
    input = "image"                                   # or "video"
    task = "classification"                           # what it is listed under
    leaf_modules = "auto"                             # kept whole: a path, a pattern, MODULE:CLASS, "auto", or a list
    leaf_functions = ["mylib.ops:gather"]             # functions kept whole
    concrete_args = { return_dict = false }           # arguments of its forward with this one value

    [models.tiny.preprocessing]                       # torchvision's names and, where left out, its values
    resize_size = 232                                 # the shorter side, or [height, width]
    crop_size = 224                                   # without it nothing is cropped
    mean = [0.485, 0.456, 0.406]
    std = [0.229, 0.224, 0.225]
    interpolation = "bicubic"

A package says the same by an entry point of the group ``fxcore.models`` that names a :class:`UserModel`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torch import nn
from torchvision.transforms import InterpolationMode

from fxcore.copies import narrowed, shared_copy
from fxcore.errors import FxError, summarize
from fxcore.images.preprocessing import ImagePreprocessing, Preprocessing, VideoPreprocessing
from fxcore.images.presets import ImageClassification, SemanticSegmentation, VideoClassification
from fxcore.models.entry import ModelEntry, Task, WeightsInfo
from fxcore.models.state_dicts import StateDict, filled, read_file
from fxcore.models.timm_models import PREFIX
from fxcore.models.torchvision_models import torchvision_models

FILE = "models.toml"
GROUP = "fxcore.models"

BUILT = "builder"
"""Name of the weights of a model without a weights file: those that its builder makes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INPUTS: dict[str, tuple[Task, ...]] = {"image": ("classification", "segmentation"), "video": ("video",)}


class BadUserModel(FxError):
    """A model's description is wrong; ``name`` says which model's."""


@dataclass(frozen=True)
class UserModel:
    """A model, described.

    Attributes:
        builder: gives the model; ``arguments`` are passed by name. A module that it gives again and again is neither
            changed nor moved; its weights are shared.
        weights: a state dict (safetensors, or torch's format with tensors only); None: the builder's own.
        preprocessing: ``resize_size``, ``crop_size``, ``mean``, ``std``, ``interpolation``, ``antialias``, as of
            torchvision's presets.
        input: ``image`` or ``video``: what one row of its input is.
        task: what it is listed under: ``classification`` or ``segmentation``, of videos ``video``.
        leaf_modules, leaf_functions: kept whole when it is traced, see :func:`fxcore.tracing.tracer.trace`.
        concrete_args: arguments of its forward that have this one value. Those that are not here have their defaults;
            its input is what has none, else the first.

    Raises:
        BadUserModel: an attribute is of another type.

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

    def __post_init__(self) -> None:
        if not callable(self.builder):
            raise BadUserModel(f"builder is a function that returns an nn.Module, not {self.builder!r:.100}")
        for name in ("arguments", "preprocessing", "concrete_args"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise BadUserModel(f"{name} is a dictionary by name, not {value!r:.100}")
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
    """A user's model among torchvision's.

    Attributes:
        preset: makes the transform of its images or clips.
        leaves, functions: modules and functions kept whole.
    """

    preset: Callable[[], Any] = ImageClassification
    leaves: tuple[type[nn.Module] | str, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()

    def preprocessing(self, weights: str = "DEFAULT", image_size: int | None = None) -> Preprocessing:
        kind = VideoPreprocessing if self.task == "video" else ImagePreprocessing
        return kind(self.preset(), image_size)

    def load_published(self, weights: str) -> nn.Module:
        file = self.file(weights)
        return self.build() if file is None else self.filled(weights, read_file(file.name, file.parent), file)

    def file(self, weights: str) -> Path | None:
        """The file of ``weights``; None if the builder makes them."""
        info = self.published[weights]
        return info.path if isinstance(info, FileWeights) else None

    def filled(self, structure: str, state: StateDict, file: Path) -> nn.Module:
        return filled(self.name, self.build_weightless(structure), state, file, unread=())

    def build_weightless(self, weights: str = "random") -> nn.Module:
        """Without weights where the builder allows it; one that reads its parameters while it builds does not."""
        try:
            return super().build_weightless(weights)
        except Exception:
            return self.build(weights)

    def leaf_modules(self) -> Sequence[type[nn.Module] | str]:
        return self.leaves

    def leaf_functions(self) -> Sequence[Callable[..., Any]]:
        return self.functions


@dataclass(frozen=True)
class FileWeights(WeightsInfo):
    """Weights in a file of the operator's.

    Attributes:
        path: the file; None: the builder makes them.
    """

    path: Path | None = None

    @property
    def file(self) -> Path:
        return self.path or Path()

    @property
    def cached(self) -> bool:
        return self.path is None or self.path.is_file()

    def download(self) -> None:
        """Nothing: a file that is missing is an error when it is read."""


def read_models(folder: Path | None) -> Iterator[tuple[str, UserEntry | BadUserModel]]:
    """Every model that installed packages and ``models.toml`` in ``folder`` describe, built once without weights.

    Yields:
        A name, and the model or what is wrong with its description.
    """
    names: set[str] = set()
    for name, describe in [*_of_packages(), *(_of_file(folder) if folder is not None else ())]:
        try:
            if name in names:
                raise BadUserModel("two descriptions have this name")
            names.add(name)
            yield name, user_entry(name, describe())
        except Exception as error:  # a package describes its models in values of any type
            yield name, wrong(name, error)


def wrong(name: str, error: Exception) -> BadUserModel:
    """``error``, raised while something was done with the model ``name``, as an error of that model."""
    return BadUserModel(
        f"model {name!r}: {error.detail if isinstance(error, FxError) else summarize(error)}", name=name
    )


def user_entry(name: str, model: UserModel) -> UserEntry:
    """``model`` as an entry of the catalog.

    Raises:
        BadUserModel: something in its description is wrong.
    """
    if not _NAME.fullmatch(name):
        raise BadUserModel("a name is at most 128 letters, digits, '.', '_' and '-', and begins with a letter or digit")
    if name in torchvision_models():
        raise BadUserModel("torchvision has a model of this name; take another")
    if name.startswith(PREFIX):
        raise BadUserModel(f"names that begin with {PREFIX!r} are timm's; take another")
    if model.input not in _INPUTS:
        raise BadUserModel(f"input is {' or '.join(_INPUTS)}, not {model.input!r}")
    tasks = _INPUTS[model.input]
    task = next((t for t in tasks if t == (model.task or tasks[0])), None)
    if task is None:
        raise BadUserModel(f"task is {' or '.join(tasks)} for input {model.input!r}, not {model.task!r}")
    if model.weights is not None and not model.weights.is_file():
        raise BadUserModel(f"there is no weights file {model.weights}")
    preset = _preset(model.input, model.preprocessing)
    weights = model.weights.name if model.weights is not None else BUILT
    leaves = (model.leaf_modules,) if isinstance(model.leaf_modules, str) else tuple(model.leaf_modules)
    entry = UserEntry(
        name,
        task,
        functools.partial(_build, model),
        default_weights=weights,
        preset=preset,
        leaves=leaves,
        functions=tuple(model.leaf_functions),
    )
    try:
        built = entry.build_weightless()
    except BadUserModel:
        raise
    except Exception as error:
        raise BadUserModel(f"its builder failed: {summarize(error)}") from error
    params = sum(parameter.numel() for parameter in built.parameters())
    info = FileWeights(weights, "", params, {}, (), path=model.weights)
    return replace(entry, published={weights: info})


def _of_packages() -> Iterator[tuple[str, Callable[[], UserModel]]]:
    for point in entry_points(group=GROUP):

        def load(point: Any = point) -> UserModel:
            try:
                model = point.load()
            except Exception as error:
                raise BadUserModel(f"its entry point {point.value} cannot be loaded: {summarize(error)}") from error
            if not isinstance(model, UserModel):
                raise BadUserModel(f"its entry point {point.value} is no fxcore.UserModel but {type(model).__name__}")
            return model

        yield point.name, load


def _of_file(folder: Path) -> Iterator[tuple[str, Callable[[], UserModel]]]:
    path = folder / FILE
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FxError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    tables = document.pop("models", {})
    if document or not isinstance(tables, dict):
        raise FxError(f"{path}: each model has a table [models.NAME]; there is also {', '.join(document) or 'models'}")
    for name, table in tables.items():
        yield name, functools.partial(_described, table, folder)


def _described(table: Any, folder: Path) -> UserModel:
    """A table of ``models.toml``."""
    kinds: dict[str, tuple[type, ...]] = {
        "builder": (str,),
        "arguments": (dict,),
        "weights": (str,),
        "preprocessing": (dict,),
        "input": (str,),
        "task": (str,),
        "leaf_modules": (str, list),
        "leaf_functions": (list,),
        "concrete_args": (dict,),
    }
    called: dict[type, str] = {str: "text", dict: "a table", list: "a list of text"}
    if not isinstance(table, dict) or "builder" not in table:
        raise BadUserModel("it has no builder; write builder = 'MODULE:CALLABLE'")
    for key, value in table.items():
        if key not in kinds:
            raise BadUserModel(f"{key!r} is none of {', '.join(kinds)}")
        listed = value if isinstance(value, list) else []
        if not isinstance(value, kinds[key]) or not all(isinstance(item, str) for item in listed):
            raise BadUserModel(f"{key} is {' or '.join(called[kind] for kind in kinds[key])}, not {value!r}")
    fields = dict(table)
    fields["builder"] = _imported("builder", table["builder"])
    fields["weights"] = folder / table["weights"] if "weights" in table else None
    leaves = table.get("leaf_modules", [])
    fields["leaf_modules"] = [
        _imported("leaf_modules", leaf) if ":" in leaf else leaf
        for leaf in ([leaves] if isinstance(leaves, str) else leaves)
    ]
    fields["leaf_functions"] = [_imported("leaf_functions", path) for path in table.get("leaf_functions", [])]
    return UserModel(**fields)


def _imported(key: str, path: str) -> Any:
    """What ``key`` names as MODULE:CALLABLE."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise BadUserModel(f"{key} is written MODULE:CALLABLE, unlike {path!r}")
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:
        raise BadUserModel(f"its {key} {path} cannot be imported: {summarize(error)}") from error
    if not callable(found):
        raise BadUserModel(f"its {key} {path} is {type(found).__name__}, which cannot be called")
    return found


def _preset(input: str, parameters: Mapping[str, Any]) -> Callable[[], Any]:
    """What makes torchvision's transform with these parameters."""
    known = ("resize_size", "crop_size", "mean", "std", "interpolation", "antialias")
    for name in parameters:
        if name not in known:
            raise BadUserModel(f"preprocessing has no {name!r}; it has {', '.join(known)}")
    given = dict(parameters)
    resize = _sizes("resize_size", given.pop("resize_size", None))
    crop = _sizes("crop_size", given.pop("crop_size", None))
    for name in ("mean", "std"):
        values = given.get(name, [0.5, 0.5, 0.5])
        if not isinstance(values, list) or len(values) != 3 or not all(isinstance(v, (int, float)) for v in values):
            raise BadUserModel(f"preprocessing: {name} is a list of three numbers, not {values!r}")
    if not isinstance(given.get("antialias", True), bool):
        raise BadUserModel(f"preprocessing: antialias is true or false, not {given['antialias']!r}")
    if "interpolation" in given:
        modes = {mode.value: mode for mode in InterpolationMode}
        if given["interpolation"] not in modes:
            raise BadUserModel(f"preprocessing: interpolation is one of {', '.join(modes)}")
        given["interpolation"] = modes[given["interpolation"]]
    if input == "video":
        given.pop("antialias", None)
        size = crop or resize or [112, 112]
        clip = (size[0], size[-1])
        return functools.partial(VideoClassification, crop_size=clip, resize_size=_pair(resize or size), **given)
    if crop is not None and len(crop) == 2 and crop[0] != crop[1]:
        raise BadUserModel("preprocessing: crop_size of images is one number, the side of a square")

    def make() -> Any:
        if crop is None and resize is not None:
            preset: Any = SemanticSegmentation(resize_size=None, **given)
            preset.resize_size = list(resize)
        else:
            preset = ImageClassification(crop_size=crop[0] if crop else 224, **given)
            preset.resize_size = list(resize or crop or [256])
        return preset

    return make


def _sizes(name: str, value: Any) -> list[int] | None:
    """``224`` or ``[224, 320]`` as a list."""
    if value is None:
        return None
    sizes = value if isinstance(value, list) else [value]
    if not 1 <= len(sizes) <= 2 or not all(type(size) is int and 0 < size <= 4096 for size in sizes):
        raise BadUserModel(f"preprocessing: {name} is a number of pixels, or [height, width], not {value!r}")
    return sizes


def _pair(sizes: list[int]) -> tuple[int] | tuple[int, int]:
    return (sizes[0],) if len(sizes) == 1 else (sizes[0], sizes[1])


def _build(model: UserModel, weights: None = None) -> nn.Module:
    """Call the builder; ``weights`` is what torchvision's builders are called with.

    What it gives may be in use elsewhere, and what is built here is moved, cast and frozen: so it is copied.
    """
    built = model.builder(**model.arguments)
    if not isinstance(built, nn.Module):
        raise BadUserModel(f"its builder gave {type(built).__name__}, not an nn.Module")
    try:
        private = shared_copy(built, own_parameters=True)
    except Exception as error:
        if model.builder(**model.arguments) is built:
            raise BadUserModel(
                f"its builder gives the same module each time, which cannot be copied ({summarize(error)}); give "
                "a builder that makes a new one"
            ) from error
        private = built
    return _with_inputs_only(private, model.concrete_args)


def _with_inputs_only(model: nn.Module, fixed: Mapping[str, Any]) -> nn.Module:
    """The model with a forward that takes its inputs only: what has no default and is not ``fixed``, else its first
    argument."""
    parameters = [*inspect.signature(type(model).forward).parameters.values()][1:]
    simple = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = [
        p.name for p in parameters if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    for name in fixed:
        if name not in names and not takes_any:
            raise BadUserModel(f"concrete_args: its forward takes {', '.join(names) or 'nothing'}, and no {name!r}")
    free = [p for p in parameters if p.kind in simple and p.name not in fixed]
    needed = [p.name for p in free if p.default is p.empty] or [p.name for p in free[:1]]
    if not needed:
        raise BadUserModel("its forward has no argument that is free, so nothing says what its input is")
    return model if len(needed) == len(parameters) else narrowed(model, needed, fixed)
