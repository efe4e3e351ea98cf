"""Models of an operator's own: a module and the ``models.toml`` that describes what it builds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fxcore.models.catalog import register


@contextmanager
def own_models(folder: Path, source: str, models: str) -> Iterator[ModuleType]:
    """Import ``source`` as the module ``own_models``, and describe its ``models`` in ``folder``.

    After the block neither the module nor the models that a service registered are left.
    """
    (folder / "own_models.py").write_text(source)
    (folder / "models.toml").write_text(models)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("own_models")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("own_models", None)
        register({})
