"""torch's ahead-of-time compiler, whose documented functions are in a private module.

The only file that uses it: where it is missing, the backend inductor is not available.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

MISSING = "inductor needs torch._inductor with aoti_compile_and_package, which this torch does not have"


def available() -> bool:
    """Return whether torch has the compiler."""
    try:
        if importlib.util.find_spec("torch._inductor") is None:
            return False
        return all(hasattr(torch._inductor, f"aoti_{verb}_package") for verb in ("compile_and", "load"))
    except (ImportError, ValueError, AttributeError):
        return False


def compile_package(program: Any, path: Path, options: Mapping[str, Any]) -> None:
    """Compile an exported program into the package ``path``."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(options))


def load_package(path: str) -> Callable[..., Any]:
    """Load a package to run it."""
    run: Callable[..., Any] = torch._inductor.aoti_load_package(path)
    return run
