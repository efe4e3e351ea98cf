"""Attributes that graphs read."""

from __future__ import annotations

from typing import Any

from torch import nn


def attribute(module: nn.Module, target: str) -> Any:
    """The attribute that a ``get_attr`` node reads, by its target.

    >>> tuple(attribute(nn.Sequential(nn.Linear(2, 3)), "0.bias").shape)
    (3,)
    """
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
