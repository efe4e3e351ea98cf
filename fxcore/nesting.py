"""Find and map tensors in nested containers: lists, tuples, dicts and others that torch's pytree supports.

Tensors are also found in dataclasses, and in classes of dicts that pytree does not know.

torch's pytree module is private; without it, only lists, tuples and mappings are supported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Size, Tensor

from fxcore.tensors import strided_parts

try:
    from torch.utils import _pytree
except ImportError:
    _pytree = None  # type: ignore[assignment]


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in ``value``, in order.

    >>> import torch
    >>> [t.ndim for t in tensors_in({"a": [torch.zeros(2), None], "b": (torch.zeros(2, 2), 1)})]
    [1, 2]
    """
    leaves = _pytree.tree_leaves(value) if _pytree is not None else [value]
    return [inner for leaf in leaves for inner in _leaves(leaf) if isinstance(inner, Tensor)]


def storage_ids(value: Any) -> frozenset[int]:
    """Return the ids of the storages of all tensors in ``value``.

    >>> x = torch.zeros(2, 2)
    >>> storage_ids({"row": x[0], "all": [x]}) == storage_ids(x)
    True
    """
    parts = (part for tensor in tensors_in(value) for part in strided_parts(tensor))
    return frozenset(part.untyped_storage()._cdata for part in parts)


def _leaves(value: Any) -> Iterator[Any]:
    items = members(value)
    if items is None:
        yield value
    else:
        for inner in items.values():
            yield from _leaves(inner)


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
    if _pytree is not None:
        return _pytree.tree_map_only(Tensor, function, value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        copies = [map_tensors(function, inner) for inner in value]
        return type(value)(*copies) if hasattr(value, "_fields") else type(value)(copies)  # namedtuple or not
    return function(value) if isinstance(value, Tensor) else value


def clones(inputs: Iterable[Any]) -> tuple[Any, ...]:
    """Return the inputs of a call with copies of all tensors in them, for modules that may write to their inputs."""
    copies: tuple[Any, ...] = map_tensors(torch.clone, tuple(inputs))
    return copies
