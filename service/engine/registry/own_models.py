"""The operator's own models: read, tried and put into the catalog when the service starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from fxcore.errors import FxError
from fxcore.graph.model_graph import model_graph
from fxcore.models.catalog import ModelEntry, get_model, register
from fxcore.models.user_models import UserEntry, read_models, wrong
from fxcore.models.weights import load_model

log = logging.getLogger("fxserve.models")


def register_models(folder: Path | None, try_each: bool) -> None:
    """Put the models of installed packages and of ``models.toml`` in ``folder`` into the catalog.

    What is wrong with one is logged as an error and costs no other its place.

    Args:
        folder: the setting ``models_dir``.
        try_each: whether to trace each and load its weights file once, so that errors show at the start.
    """
    found: dict[str, ModelEntry | FxError] = {}
    try:
        for name, model in read_models(folder):
            made = _tried(name, model) if try_each and isinstance(model, UserEntry) else model
            if isinstance(made, FxError):
                log.error("%s", made.detail)
            found.setdefault(name, made)
    except FxError as error:
        log.error("no models of your own: %s", error.detail)
    register(found)


def warn_unknown_models(names: Iterable[str]) -> None:
    """Log an error for each of ``names``, the setting ``models``, that is in no catalog and so cannot be served."""
    for name in names:
        try:
            get_model(name)
        except FxError as error:
            log.error("FXSERVE_MODELS: %s", error.detail)


def _tried(name: str, entry: UserEntry) -> UserEntry | FxError:
    weights = str(entry.default_weights)
    try:
        model_graph(entry, weights)
        if entry.file(weights) is not None:
            load_model(entry, weights)
    except Exception as error:  # the model's own code ran
        return wrong(name, error)
    return entry
