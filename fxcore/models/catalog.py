"""Which models there are: torchvision's, timm's where it is installed, and users' own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal, get_args

from fxcore import torch_ao
from fxcore.bad_argument import BadArgument
from fxcore.errors import FxError, UnknownModel, Unsupported
from fxcore.models.entry import ModelEntry
from fxcore.models.timm_models import PREFIX, TimmEntry, timm_model, timm_models
from fxcore.models.torchvision_models import TorchvisionEntry, torchvision_models

Source = Literal["torchvision", "timm", "own"]

# Users' own models, and errors in the descriptions of others, by name.
_registered: dict[str, ModelEntry] = {}
_refused: dict[str, FxError] = {}


def register(entries: Mapping[str, ModelEntry | FxError]) -> None:
    """Put ``entries`` into the catalog beside torchvision's models, in place of all that were registered before.

    Args:
        entries: name → the model, or what is wrong with its description.
    """
    global _registered, _refused
    _registered = {name: entry for name, entry in entries.items() if isinstance(entry, ModelEntry)}
    _refused = {name: error for name, error in entries.items() if isinstance(error, FxError)}


def list_models(source: Source | None = None) -> list[ModelEntry]:
    """All models, by name: torchvision's, and users' own (:mod:`fxcore.models.user_models`).

    Args:
        source: only those of ``torchvision``, or ``own`` ones; or ``timm``'s, which are listed so only.

    Raises:
        BadArgument: a source that is none of those.
        Unsupported: timm's are asked for, and it is not installed.

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
    asked = {**(torchvision_models() if source != "own" else {}), **(_registered if source != "torchvision" else {})}
    entries = [entry for _, entry in sorted(asked.items())]
    return [entry for entry in entries if entry.task != "quantization" or torch_ao.available()]


def source_of(entry: ModelEntry) -> Source:
    """Where a model comes from.

    >>> source_of(get_model("resnet18"))
    'torchvision'
    """
    if isinstance(entry, TimmEntry):
        return "timm"
    return "torchvision" if isinstance(entry, TorchvisionEntry) else "own"


def get_model(name: str) -> ModelEntry:
    """The model called ``name``. The first of timm's takes seconds, in which timm is imported.

    Raises:
        UnknownModel: no model has that name; the error suggests the nearest.
        BadArgument: it is no name.
        Unsupported: torch can no longer run it, or timm is not installed.

    >>> get_model("resnet50").default_weights
    'IMAGENET1K_V2'
    """
    if not isinstance(name, str):
        raise BadArgument(f"a model's name is text such as 'resnet50', not {name!r:.100}")
    if name.startswith(PREFIX):
        return timm_model(name)
    registry = {**torchvision_models(), **_registered}
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
