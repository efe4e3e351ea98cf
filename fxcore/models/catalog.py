"""The catalog of models: torchvision's, timm's and packaged ones if installed, and users' own."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from typing import Literal, get_args

from fxcore.errors import BadArgument, FxError, NotTraceable, UnknownModel, Unsupported
from fxcore.models import torch_ao
from fxcore.models.entry import ModelEntry
from fxcore.models.packaged_models import PackagedEntry, packaged_models
from fxcore.models.timm_models import PREFIX, TimmEntry, imported, timm_model, timm_models
from fxcore.models.torchvision_models import TorchvisionEntry, torchvision_models

Source = Literal["torchvision", "timm", "packaged", "own"]

# Users' own models, and errors in descriptions and models, by name.
_registered: dict[str, ModelEntry] = {}
_refused: dict[str, FxError] = {}


def register(entries: Mapping[str, ModelEntry | FxError]) -> None:
    """Replace the users' models in the catalog by ``entries``.

    Args:
        entries: model, or error in it or its description, by name.
    """
    global _registered, _refused
    _registered = {name: entry for name, entry in entries.items() if isinstance(entry, ModelEntry)}
    _refused = {name: error for name, error in entries.items() if isinstance(error, FxError)}


def list_models(source: Source | None = None) -> list[ModelEntry]:
    """Return all models of torchvision, of packages (:mod:`fxcore.models.packaged_models`) and of users
    (:mod:`fxcore.models.descriptions`), sorted by name.

    Args:
        source: list only ``torchvision``, ``packaged`` (packages), ``own`` (users) or ``timm`` models. timm's models
            are listed only with ``source="timm"``.

    Raises:
        BadArgument: the source is unknown.
        Unsupported: the source is timm, and timm is not installed.

    >>> names = [entry.name for entry in list_models()]
    >>> len(names) >= 121, "resnet18" in names, names == sorted(names)
    (True, True, True)
    >>> len(list_models("timm")) > 1000
    True
    """
    if source is not None and source not in get_args(Source):
        raise BadArgument(f"there is no source {source!r:.100}; there are {', '.join(get_args(Source))}")
    if source == "timm":
        return list(timm_models().values())
    by_source = {"torchvision": torchvision_models(), "packaged": packaged_models(), "own": _registered}
    asked = by_source if source is None else {source: by_source[source]}
    entries = sorted((entry for models in asked.values() for entry in models.values()), key=lambda entry: entry.name)
    return [entry for entry in entries if entry.task != "quantization" or torch_ao.available()]


def source_of(entry: ModelEntry) -> Source:
    """Return the source of a model.

    >>> source_of(get_model("resnet18"))
    'torchvision'
    """
    if isinstance(entry, TimmEntry):
        return "timm"
    if isinstance(entry, PackagedEntry):
        return "packaged"
    return "torchvision" if isinstance(entry, TorchvisionEntry) else "own"


def get_model(name: str) -> ModelEntry:
    """Return the model called ``name``. The first call for a timm model imports timm, which takes seconds.

    Raises:
        UnknownModel: there is no model of that name; ``suggestions`` has similar names.
        NotTraceable: it is a user's model that torch.fx cannot trace.
        BadArgument: ``name`` is not a string.
        Unsupported: this torch cannot run the model, or timm is not installed.

    >>> get_model("resnet50").default_weights
    'IMAGENET1K_V2'
    """
    if not isinstance(name, str):
        raise BadArgument(f"a model's name is text such as 'resnet50', not {name!r:.100}")
    if name.startswith(PREFIX):
        return timm_model(name)
    registry = {**torchvision_models(), **packaged_models(), **_registered}
    quantized = registry[name].task == "quantization" if name in registry else name.startswith("quantized_")
    if quantized and not torch_ao.available():
        near = [name.removeprefix("quantized_")]
        detail = f"model {name[:64]!r} is not available here ({torch_ao.MISSING}); available: {near[0][:64]}"
        raise Unsupported(detail, field="model", value=name[:64], available=[n for n in near if n in registry])
    if name in registry:
        return registry[name]
    if isinstance(refused := _refused.get(name), NotTraceable):
        raise copy.copy(refused)
    if refused is not None:
        raise UnknownModel(f"the description of model {name!r} is invalid; the log says why", name=name, suggestions=[])
    lower = {known.lower(): known for known in registry}
    suggestions = [lower[near] for near in difflib.get_close_matches(name.lower(), lower, n=5, cutoff=0.5)]
    if imported() and PREFIX + name in timm_models():
        suggestions.insert(0, PREFIX + name)
    hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; see the list of models"
    raise UnknownModel(f"there is no model {name!r}{hint}", name=name, suggestions=suggestions)
