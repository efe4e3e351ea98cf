"""The operator's own models: they are read, tested and added to the catalog when the service starts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from pathlib import Path

from fxcore.errors import FxError, NotTraceable
from fxcore.graph.model_graph import model_graph
from fxcore.models.catalog import get_model, list_models, register
from fxcore.models.descriptions import read_models
from fxcore.models.entry import ModelEntry
from fxcore.models.timm_models import PREFIX
from fxcore.models.user_models import BadUserModel, UserEntry, as_bad_model
from service.engine.models.own_model_check import checked
from service.engine.models.served import is_served

log = logging.getLogger("fxserve.models")


def register_models(folder: Path | None, try_each: bool) -> None:
    """Add the models of installed packages and of ``folder``'s ``models.toml`` to the catalog.

    An error in one is logged and does not affect the others.

    Args:
        folder: the setting ``models_dir``.
        try_each: whether to trace each model, load its weights and run it, so that errors show at startup.
    """
    found: dict[str, ModelEntry | FxError] = {}
    try:
        for name, model in read_models(folder):
            made = _tried(name, model) if try_each and isinstance(model, UserEntry) else model
            if isinstance(made, FxError):
                log.error("%s", (made if isinstance(made, BadUserModel) else as_bad_model(name, made)).detail)
            found.setdefault(name, made)
    except FxError as error:
        log.error("no models of your own: %s", error.detail)
    register(found)


def warn_unknown_models(patterns: Iterable[str]) -> None:
    """Log an error for each of ``patterns`` (the setting ``models``) that matches no model.

    A pattern for timm's models imports timm, so do not call it on the event loop.
    """
    for pattern in patterns:
        try:
            if not set("*?[").intersection(pattern):
                get_model(pattern)
                continue
            with_timm = pattern.startswith(PREFIX)
            if not any(is_served(entry.name, [pattern]) for entry in list_models("timm" if with_timm else None)):
                log.error("FXSERVE_MODELS: there is no model of a name like %r", pattern)
        except FxError as error:
            log.error("FXSERVE_MODELS: %s", error.detail)


def _tried(name: str, entry: UserEntry) -> UserEntry | FxError:
    weights = str(entry.default_weights)
    try:
        return checked(entry, model_graph(entry, weights))
    except NotTraceable as error:
        return copy.copy(error)  # without its traceback, whose frames hold the model
    except (Exception, SystemExit) as error:  # the model's own code may raise anything, and scripts end the process
        return as_bad_model(name, error)
