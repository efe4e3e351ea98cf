"""Find and map tensors in nested containers: those of torch's pytree, dataclasses, and subclasses of lists and dicts.

Tensors are also found in mappings of other classes, and stay in them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Size, Tensor
from torch.utils import _pytree

from fxcore.tensors import strided_parts


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in ``value``, in order.

    >>> import torch
    >>> [t.ndim for t in tensors_in({"a": [torch.zeros(2), None], "b": (torch.zeros(2, 2), 1)})]
    [1, 2]
    """
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def storage_ids(value: Any) -> frozenset[int]:
    """Return the ids of the storages of all tensors in ``value``.

    >>> x = torch.zeros(2, 2)
    >>> storage_ids({"row": x[0], "all": [x]}) == storage_ids(x)
    True
    """
    parts = (part for tensor in tensors_in(value) for part in strided_parts(tensor))
    return frozenset(part.untyped_storage()._cdata for part in parts)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what is in ``value`` and is no container, in order."""
    for leaf in _pytree.tree_leaves(value):
        inner = members(leaf)
        if inner is None:
            yield leaf
        else:
            yield from _leaves(list(inner.values()))


def members(value: Any) -> dict[str, Any] | None:
    """Return the members of a list, tuple, mapping or dataclass by index or name; None for other values.

    >>> members([3, None]), members({"a": 4}), members("text")
    ({'0': 3, '1': None}, {'a': 4}, None)
    """
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Size):
        return {str(index): inner for index, inner in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Copy ``value``, replacing each tensor by ``function(tensor)``.

    >>> import torch
    >>> map_tensors(lambda t: t.ndim, {"a": [torch.zeros(2), None]})
    {'a': [1, None]}
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, (dict, UserDict)):  # a copy of another mapping may share its items
            made: Any = copy.copy(leaf)
            for key, inner in leaf.items():
                made[key] = map_tensors(function, inner)
        elif isinstance(leaf, list):
            made = copy.copy(leaf)
            made[:] = map_tensors(function, list(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            made = copy.copy(leaf)
            for name, inner in (members(leaf) or {}).items():
                object.__setattr__(made, name, map_tensors(function, inner))  # of a frozen one too
        else:
            return leaf
        return made

    return _pytree.tree_map(mapped, value)


def clones(inputs: Iterable[Any]) -> tuple[Any, ...]:
    """Return the inputs of a call with copies of all tensors in them, for modules that may write to their inputs."""
    copies: tuple[Any, ...] = map_tensors(torch.clone, tuple(inputs))
    return copies
