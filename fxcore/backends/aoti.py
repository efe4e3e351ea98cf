"""torch's ahead-of-time compiler (AOTInductor), whose documented functions are in a private module.

Only this file uses it. If torch does not have it, the ``inductor`` backend is unavailable.
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
    """Compile an exported program to a package at ``path``."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(options))


def load_package(path: str) -> Callable[..., Any]:
    """Load a package as a callable."""
    run: Callable[..., Any] = torch._inductor.aoti_load_package(path)
    return run
