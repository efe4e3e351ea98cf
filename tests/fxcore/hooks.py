"""Inner values of a module by a forward hook, the reference for extractors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def hooked(module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
    """What the part at ``path`` returns in a run of the module itself."""
    seen: list[Any] = []
    handle = module.get_submodule(path).register_forward_hook(lambda m, i, o: seen.append(copy.deepcopy(o)))
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    finally:
        handle.remove()
    return seen[-1]
