"""Read the descriptions of users' own models, from ``models.toml`` or installed packages.

``models.toml`` has a table for each model::

    [models.tiny]
    builder = "timm:create_model"                     # MODULE:CALLABLE of an installed package, returns an nn.Module
    arguments = { model_name = "resnet10t", num_classes = 10 }
    weights = "tiny.safetensors"                      # a state dict beside this file; without it, the builder's own
    input = "image"                                   # or "video"
    task = "classification"                           # or "segmentation"; of videos "video"
    leaf_modules = "auto"                             # not traced into: path, pattern, MODULE:CLASS, "auto", or a list
    leaf_functions = ["mylib.ops:gather"]             # functions that are not traced into
    concrete_args = { return_dict = false }           # arguments of forward with a fixed value
    batch = false                                     # one image at a time: values depend on the others in a batch

    [models.tiny.preprocessing]                       # torchvision's names, and its defaults
    resize_size = 232                                 # the shorter side, or [height, width]
    crop_size = 224                                   # omit for no crop
    mean = [0.485, 0.456, 0.406]
    std = [0.229, 0.224, 0.225]
    interpolation = "bicubic"

A package registers a model with an entry point in the group ``fxcore.models`` that refers to a
:class:`~fxcore.models.user_models.UserModel`.
"""

from __future__ import annotations

import functools
import importlib
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fxcore.errors import FxError, summarize
from fxcore.models.user_models import BadUserModel, UserEntry, UserModel, as_bad_model, user_entry

FILE = "models.toml"
GROUP = "fxcore.models"


def read_models(folder: Path | None) -> Iterator[tuple[str, UserEntry | BadUserModel]]:
    """Read all models described by installed packages and by ``models.toml`` in ``folder``.

    Each model is built once, without weights.

    Yields:
        Each model's name, with its entry or the error in its description.

    Raises:
        FxError: ``models.toml`` cannot be read, or is not valid TOML.
    """
    names: set[str] = set()
    for name, describe in [*_from_packages(), *(_from_file(folder) if folder is not None else ())]:
        try:
            if name in names:
                raise BadUserModel("two descriptions have this name")
            names.add(name)
            yield name, user_entry(name, describe())
        except Exception as error:  # a package may describe its models with values of any type
            yield name, as_bad_model(name, error)


def _from_packages() -> Iterator[tuple[str, Callable[[], UserModel]]]:
    """Yield each model's name, and a function that loads its description."""
    for point in entry_points(group=GROUP):

        def load(point: Any = point) -> UserModel:
            try:
                model = point.load()
            except (Exception, SystemExit) as error:  # scripts that read a command line end the process
                raise BadUserModel(f"its entry point {point.value} cannot be loaded: {summarize(error)}") from error
            if not isinstance(model, UserModel):
                raise BadUserModel(f"its entry point {point.value} is a {type(model).__name__}, not a fxcore.UserModel")
            return model

        yield point.name, load


def _from_file(folder: Path) -> Iterator[tuple[str, Callable[[], UserModel]]]:
    """Yield each model's name, and a function that parses its table."""
    path = folder / FILE
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FxError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    tables = document.pop("models", {})
    if document or not isinstance(tables, dict):
        raise FxError(f"{path}: each model has a table [models.NAME]; there is also {', '.join(document) or 'models'}")
    for name, table in tables.items():
        yield name, functools.partial(_parse_table, table, folder)


_KEYS: dict[str, tuple[type, ...]] = {
    "builder": (str,),
    "arguments": (dict,),
    "weights": (str,),
    "preprocessing": (dict,),
    "input": (str,),
    "task": (str,),
    "leaf_modules": (str, list),
    "leaf_functions": (list,),
    "concrete_args": (dict,),
    "batch": (bool,),
}
"""Keys of a table in ``models.toml``, and the types allowed for each."""

_TYPE_NAMES: dict[type, str] = {bool: "true or false", str: "text", dict: "a table", list: "a list of text"}


def _parse_table(table: Any, folder: Path) -> UserModel:
    """Check a table of ``models.toml`` and import the callables it names."""
    if not isinstance(table, dict) or "builder" not in table:
        raise BadUserModel("it has no builder; write builder = 'MODULE:CALLABLE'")
    for key, value in table.items():
        if key not in _KEYS:
            raise BadUserModel(f"{key!r} is none of {', '.join(_KEYS)}")
        items = value if isinstance(value, list) else []
        if not isinstance(value, _KEYS[key]) or not all(isinstance(item, str) for item in items):
            raise BadUserModel(f"{key} is {' or '.join(_TYPE_NAMES[kind] for kind in _KEYS[key])}, not {value!r}")
    fields = dict(table)
    fields["builder"] = _import("builder", table["builder"])
    fields["weights"] = folder / table["weights"] if "weights" in table else None
    leaves = table.get("leaf_modules", [])
    fields["leaf_modules"] = [
        _import("leaf_modules", leaf) if ":" in leaf else leaf
        for leaf in ([leaves] if isinstance(leaves, str) else leaves)
    ]
    fields["leaf_functions"] = [_import("leaf_functions", path) for path in table.get("leaf_functions", [])]
    return UserModel(**fields)


def _import(key: str, path: str) -> Any:
    """Import the callable that ``key`` gives as MODULE:CALLABLE."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise BadUserModel(f"{key} is written MODULE:CALLABLE, not {path!r}")
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # scripts that read a command line end the process
        raise BadUserModel(f"its {key} {path} cannot be imported: {summarize(error)}") from error
    if not callable(found):
        raise BadUserModel(f"its {key} {path} is {type(found).__name__}, which cannot be called")
    return found
