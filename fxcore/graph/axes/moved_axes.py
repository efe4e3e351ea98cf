"""Axes of the results of operations that move or remove them: permutations, ``einsum``, matrix products, indexing and
reductions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.graph.operations import PERMUTES, PERMUTING_ATTRIBUTES, PRODUCTS, UNCLEAR, axes_of, computed
from fxcore.tracing.writes import indices

_MARK = 2048
"""The size that stands for a tensor's first axis; one more for each further axis. Above any index along an axis, and
five such axes have fewer than 2**63 elements."""


def moves_axes(node: fx.Node, name: str) -> bool:
    """Return whether ``node``, an operation called ``name``, may move axes, so that :func:`moved` knows its result."""
    if name == "getattr":
        return node.args[1] in PERMUTING_ATTRIBUTES
    known = name in PERMUTES or name in UNCLEAR or name == "einsum"
    return known or (name in PRODUCTS and all(axes_of(a) for a in node.args[:2])) or _reorders(node, name)


def moved(node: fx.Node, name: str, value: Tensor) -> str | None:
    """Return the axes of ``node``'s ``value``, if :func:`moves_axes`; None if unknown."""
    axes: str | None = None
    if name == "einsum":
        axes = _contracted(node)
    elif name in PRODUCTS:
        left, right = (axes_of(a) or "" for a in node.args[:2])
        axes = left[:-1] + right[-1:] if len(left) == len(right) else None
    elif name == "getitem":
        axes = _indexed(node)
    elif name == "getattr" or name in PERMUTES:
        axes = _permuted(node)
    fits = axes is not None and len(axes) == value.ndim == len(set(axes))
    return axes if fits else None


def _reorders(node: fx.Node, name: str) -> bool:
    """Return whether ``node`` indexes a tensor in a way that may move axes, such as ``x[:, 0, None]``."""
    if name != "getitem" or not isinstance(node.args[0], fx.Node):
        return False
    others = [one for one in indices(node) if not isinstance(one, slice) and one is not Ellipsis]
    return len(others) > 1 and isinstance(node.args[0].meta.get("value"), Tensor)


def _indexed(node: fx.Node) -> str | None:
    """Return the axes that integers and slices leave, as in ``x[:, :, 0, 0]``."""
    axes = axes_of(node.args[0])
    index = indices(node)
    if axes is None or not all(isinstance(one, (int, slice)) or one is Ellipsis for one in index):
        return None
    whole: Any = tuple(0 if isinstance(one, int) else slice(None) if isinstance(one, slice) else one for one in index)
    return _read(axes, _marked(axes)[whole])


def _permuted(node: fx.Node) -> str | None:
    """Apply the node's permutation to a meta tensor of distinct sizes, and read the axes from the result."""
    source = node.all_input_nodes[0]
    axes = axes_of(source)
    if axes is None:
        return None
    marked = _marked(axes)
    return _read(axes, computed(node, lambda n: marked if n is source else n.meta.get("value")))


def loses_channels(node: fx.Node, name: str, value: Tensor) -> bool:
    """Return whether ``node``, a reduction or an index called ``name``, removes the channels: a score per position."""
    source = node.all_input_nodes[0]
    axes = axes_of(source)
    if axes is None or value.ndim >= len(axes):
        return False
    if name == "getitem":
        left = _indexed(node)
    elif name == "squeeze":
        ones = [axis for axis, size in zip(axes[1:], source.meta["value"].shape[1:], strict=True) if size == 1]
        left = _read(axes, computed(node, lambda _: _marked(axes, ones)))
    else:
        left = _permuted(node)
    return left is not None and len(left) == value.ndim and "C" in axes and "C" not in left


def _marked(axes: str, ones: Collection[str] = ()) -> Tensor:
    """Return a meta tensor with a distinct size for each axis, but 1 for those in ``ones``."""
    return torch.empty([1 if axis in ones else _MARK + i for i, axis in enumerate(axes)], device="meta")


def _read(axes: str, result: Any) -> str | None:
    """Return the letters of the axes of ``result``, computed from ``_marked(axes)``; ``?`` for those of other sizes."""
    if not isinstance(result, Tensor):
        return None
    letters = {_MARK + i: axis for i, axis in enumerate(axes)}
    return "".join(letters.get(size, "?") for size in result.shape)


def _contracted(node: fx.Node) -> str | None:
    """Return the axes of an ``einsum``.

    A letter of the result has the axis that it has in the operands. If one letter of the result is new, and one axis is
    summed, the operation is a linear map along that axis.
    """
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    found: dict[str, set[str]] = {}
    for letters, operand in zip(inputs.split(","), operands, strict=False):
        for letter, axis in zip(letters, axes_of(operand) or "", strict=False):
            found.setdefault(letter, set()).add(axis)
    if any(len(axes) > 1 for axes in found.values()):
        return None
    new, summed = [one for one in result if one not in found], [one for one in found if one not in result]
    if len(new) == len(summed) == 1:
        found[new[0]] = found[summed[0]]
    return "".join(next(iter(found[one])) for one in result) if set(result) <= found.keys() else None
