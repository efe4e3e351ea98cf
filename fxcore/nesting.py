"""Find and map tensors in nested containers: lists, tuples, dicts and others that torch's pytree supports.

torch's pytree module is private; without it, only lists, tuples and mappings are supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

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
    leaves = _pytree.tree_leaves(value) if _pytree is not None else _leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


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
