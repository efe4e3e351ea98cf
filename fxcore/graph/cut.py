"""Extract the part of a graph between two sets of nodes.

A cut is a set of nodes to start from. It separates the outputs if each path from the model's inputs to the outputs goes
through one of its nodes. Numbers computed from the sizes of the model's inputs, such as the number of images, do not
count as paths: they are computed from the cut's own inputs, or are constants.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.errors import BadTensor, FxError
from fxcore.graph.annotate import GROWS, MANY
from fxcore.tracing.leaves import one_node
from fxcore.tracing.names import PATH, public_name
from fxcore.tracing.reachable import reachable
from fxcore.tracing.writes import ON_COPY, written

Scale = tuple[float, int]
"""Scale and zero point of a quantized tensor."""


class OpenCut(FxError):
    """Outputs depend on the model's inputs by a path that avoids the start nodes.

    ``missing`` has the names of nodes that would close the cut.
    """


class UnneededInput(FxError):
    """No output depends on the start node ``name``, or only through other start nodes."""


@dataclass
class Part:
    """The part of a graph between two sets of nodes.

    Attributes:
        graph: the graph, without an output node.
        kept: maps a node of the whole graph to its copy or placeholder.
        fixed: whether sizes of the model's inputs are constants in the graph, so that it supports only one size. See
            :func:`require_sizes`.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    kept: dict[fx.Node, fx.Node] = field(default_factory=dict)
    fixed: bool = False


def pruned(whole: fx.Graph, wanted: Iterable[fx.Node]) -> Part:
    """Copy the inputs of ``whole``, and ``wanted`` with their ancestors."""
    part = Part()
    needed = _ancestors(wanted, ())
    for node in whole.nodes:
        if node in needed or node.op == "placeholder":
            part.kept[node] = part.graph.node_copy(node, lambda n: part.kept[n])
    return part


def cut(
    whole: fx.Graph,
    given: Mapping[str, fx.Node],
    wanted: Collection[fx.Node],
    closing: Callable[[fx.Node], bool] = lambda node: True,
    scales: Mapping[fx.Node, Scale] | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> Part:
    """Copy the nodes between ``given`` and ``wanted``, with a placeholder for each node in ``given``, in order.

    Args:
        whole: an annotated graph without in-place operations.
        given: start nodes by key. A quantized node becomes a floating-point placeholder; a node with k rows per image
            becomes a placeholder that has them in a separate dimension, ``[N, k, …]``.
        wanted: nodes to end at.
        closing: whether a node may be suggested to close an open cut.
        scales: scales of the quantized nodes in ``given``; by default those of their annotations.
        dtypes: the dtype that a model is annotated in and the one that it runs in, if the part's inputs have the
            latter. Inputs for values that the model converts to another dtype are then converted to it.

    Raises:
        OpenCut: ``wanted`` depends on an input of ``whole`` by a path that avoids ``given``.
        UnneededInput: ``wanted`` does not depend on one of ``given``.
    """
    flow = _Flow(whole, set(given.values()))
    needed = _ancestors(wanted, flow.ends)
    if missing := flow.missing(wanted, needed, closing):
        names = [public_name(node) for node in missing]
        raise OpenCut(
            f"the requested nodes depend on the image not only through {', '.join(given)}; give {', '.join(names)} too",
            missing=names,
        )
    for key, node in given.items():
        if node not in needed:
            raise UnneededInput(
                f"no requested node depends on the input {key!r} besides the other inputs; leave it out", name=key
            )
    part = Part()
    taken: set[str] = set()
    for key, node in given.items():
        placeholder = part.kept[node] = part.graph.placeholder(unused_identifier(key, taken))
        placeholder.meta = {k: v for k, v in node.meta.items() if k != "mutates"}
    numbers = _Numbers(part, given.values(), dtypes)
    for node in given.values():
        value = node.meta["value"]
        if node.meta.get("rows", 1) > 1:
            part.kept[node] = part.graph.call_method("flatten", (part.kept[node], 0, 1))
        if value.is_quantized:
            scale, zero = (scales or {}).get(node) or (value.q_scale(), value.q_zero_point())
            part.kept[node] = part.graph.call_function(
                torch.quantize_per_tensor, (part.kept[node], scale, zero, value.dtype)
            )
        elif dtypes is not None and value.dtype != dtypes[0]:
            part.kept[node] = part.graph.call_method("to", (part.kept[node], value.dtype))
    for node in whole.nodes:
        if node in needed and node not in flow.ends:
            part.kept[node] = part.graph.node_copy(node, lambda n: numbers.of(n) if n in flow.numbers else part.kept[n])
    return part


def unused_identifier(name: str, taken: set[str]) -> str:
    """Convert ``name`` to a valid Python identifier that is not in ``taken``, and add it.

    >>> taken = {"layer1_0"}
    >>> unused_identifier("layer1.0", taken), unused_identifier("0", taken), sorted(taken)
    ('layer1_0_', '_0', ['_0', 'layer1_0', 'layer1_0_'])
    """
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    if not name or name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


class _Flow:
    """The data flow in a graph that is cut: which nodes depend on the start nodes and which on the model's inputs.

    Attributes:
        ends: nodes where the search for ancestors stops: the start nodes, and ``numbers``.
        numbers: nodes without tensors that are computed from the sizes of the model's inputs.
    """

    def __init__(self, whole: fx.Graph, given: Collection[fx.Node]) -> None:
        self._fed: set[fx.Node] = set(given)  # depends on the given nodes
        self._open: set[fx.Node] = set()  # depends on the model's inputs by a path that avoids the given nodes
        self.numbers: set[fx.Node] = set()
        counted = any(_growing(node) for node in given)
        for node in whole.nodes:
            if node in given:
                continue
            read = node.all_input_nodes
            if self._may_be_number(node, read) and _follows_from_sizes(node, counted):
                self.numbers.add(node)
                continue
            if not self._fed.isdisjoint(read):
                self._fed.add(node)
            if not self._open.isdisjoint(read) or node.op == "placeholder":
                self._open.add(node)
        self.ends = {*given, *self.numbers}

    def _may_be_number(self, node: fx.Node, read: Collection[fx.Node]) -> bool:
        """Return whether a node may be a number that the part cannot copy, or an item of a tuple of such numbers.

        Other numbers are computed from these in the part as in the whole graph. Items are not, so that the sizes in a
        tuple that nothing reads do not count as constants.
        """
        if node.meta.get("carries") or ON_COPY in node.meta:
            return False
        item = node.target is operator.getitem and node.args[0] in self.numbers
        return item or node.op == "placeholder" or not self._open.isdisjoint(read)

    def missing(
        self, wanted: Iterable[fx.Node], needed: Collection[fx.Node], closing: Callable[[fx.Node], bool]
    ) -> list[fx.Node]:
        """Return the nodes that would close the cut, in graph order.

        These are the uncut inputs of nodes that also depend on the given nodes, and outputs that depend on no given
        node.
        """
        unfed = self._open - self._fed
        start = [node for node in wanted if node in unfed]
        for node in needed:
            if node in self._open and node in self._fed:
                start += [one for one in node.all_input_nodes if one in unfed]

        def closes(node: fx.Node) -> bool:
            # The name of a written value means nothing in the model, where item assignment returns None.
            return (closing(node) and node.target is not written) or node.op == "placeholder"

        above = reachable(start, lambda n: () if closes(n) else [one for one in n.all_input_nodes if one in self._open])
        return sorted(filter(closes, above))


_READ_FROM_VALUES = (
    *("item", "tolist", "__bool__", "__int__", "__float__", "equal", "allclose", "is_nonzero"),
    *(bool, int, float, torch.equal, torch.allclose, torch.is_nonzero),
)


def _growing(node: fx.Node) -> tuple[int, int] | None:
    """Return the dimension of a start node's placeholder that grows with the number of rows of the model's inputs, and
    its annotated size; None if it is unknown."""
    if "rows" in node.meta:  # annotated for one image, with its rows in a separate dimension of the placeholder
        return (0, 1) if node.meta["rows"] else None
    axis = node.meta.get(GROWS)
    return None if axis is None else (axis, node.meta["value"].shape[axis])


def _follows_from_sizes(node: fx.Node, counted: bool) -> bool:
    """Return whether a node's value, which has no tensors, is determined by the sizes of the model's inputs.

    Args:
        counted: whether the number of rows is known from a start node.
    """
    if "value" not in node.meta or node.target in _READ_FROM_VALUES:
        return False
    value = node.meta["value"]
    if isinstance(value, float) and node.op != "placeholder":
        return False  # read from a tensor's values, since sizes are integers
    factor, many = node.meta.get(MANY, (1, value))
    return _follows(value, many, factor if counted else 1)


def _follows(one: Any, many: Any, factor: int) -> bool:
    if isinstance(one, (tuple, list)):
        same = isinstance(many, (tuple, list)) and len(one) == len(many)
        return same and all(_follows(a, b, factor) for a, b in zip(one, many, strict=True))
    if type(one) is int:
        return type(many) is int and many in (one, factor * one)
    return one is None or (isinstance(one, (bool, float, str, torch.dtype, torch.device)) and one == many)


class _Numbers:
    """Values without tensors of the whole graph, recomputed in a part of it.

    Args:
        part: the part to add the computing nodes to.
        given: the start nodes of the part, which has their placeholders.
        dtypes: see :func:`cut`.
    """

    def __init__(self, part: Part, given: Iterable[fx.Node], dtypes: tuple[torch.dtype, torch.dtype] | None) -> None:
        self._part = part
        self._dtypes = dtypes
        self._inputs = {node: part.kept[node] for node in given}
        self._found: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        if node not in self._found:
            value = node.meta["value"]
            self._found[node] = self._expressed(value, node.meta.get(MANY, (1, value))[1])
        return self._found[node]

    def _expressed(self, one: Any, many: Any) -> Any:
        if isinstance(one, (tuple, list)):
            found = [self._expressed(a, b) for a, b in zip(one, many, strict=True)]
            return found if isinstance(one, list) else tuple(found)
        if isinstance(one, torch.device):
            first = next(iter(self._inputs.values()))
            return self._part.graph.call_function(getattr, (first, "device"))
        if isinstance(one, torch.dtype):
            return self._dtype(one)
        if type(one) is not int or one == many:
            self._part.fixed |= type(one) is int
            return one
        return self._rows(one)

    def _dtype(self, one: torch.dtype) -> Any:
        """Return the dtype of a start node that has ``one``, or the dtype that the part runs in if it is annotated in
        ``one``, since that may be another floating-point dtype than the annotated one."""
        for node, taken in self._inputs.items():
            if one.is_floating_point and node.meta["value"].dtype == one:
                return self._part.graph.call_function(getattr, (taken, "dtype"))
        return self._dtypes[1] if self._dtypes is not None and one == self._dtypes[0] else one

    def _rows(self, one: int) -> fx.Node:
        """Return a number that is ``one`` in the annotated run and grows with the number of rows.

        It is preferably the size of a start node, or a multiple of one.
        """
        growing = {node: found for node in self._inputs if (found := _growing(node))}
        node = min(growing, key=lambda n: (growing[n][1] != one, one % growing[n][1]))
        axis, size = growing[node]
        count = self._part.graph.call_method("size", (self._inputs[node], axis))
        if one == size:
            return count
        self._part.fixed = True
        if one % size:
            return self._part.graph.call_function(proportional, (count, one, size))
        return self._part.graph.call_function(operator.mul, (count, one // size))


@one_node
def proportional(count: int, one: int, size: int) -> int:
    """Return the number that is to ``count`` as ``one`` is to ``size``.

    Raises:
        BadTensor: there is no such integer.
    """
    if count * one % size:
        raise BadTensor(f"the number of rows must be a multiple of {size // math.gcd(one, size)}, but is {count}")
    return count * one // size


def require_sizes(part: Part, given: Mapping[str, fx.Node]) -> None:
    """Make a part with constant sizes refuse values of other sizes than those of the annotated run.

    Args:
        part: the part from :func:`cut`, whose graph is modified.
        given: its start nodes by key.
    """
    placeholders = part.graph.find_nodes(op="placeholder")
    with part.graph.inserting_before(placeholders[-1].next):
        for taken, (key, node) in zip(placeholders, given.items(), strict=True):
            sizes = list(node.meta["value"].shape)
            if (growing := _growing(node)) is not None:
                sizes[growing[0]] = None
            checked = part.graph.call_function(of_size, (taken, tuple(sizes), key))
            checked.meta = {"value": node.meta["value"]}
            taken.replace_all_uses_with(checked, delete_user_cb=lambda user: user is not checked)  # noqa: B023


@one_node
def of_size(value: Tensor, sizes: tuple[int | None, ...], name: str) -> Tensor:
    """Return ``value``.

    Raises:
        BadTensor: it does not have these ``sizes``, where None is any.
    """
    same = value.ndim == len(sizes)
    if not same or any(size not in (None, found) for size, found in zip(sizes, value.shape, strict=True)):
        shown = ", ".join("any" if size is None else str(size) for size in sizes)
        raise BadTensor(
            f"{name} must have the sizes [{shown}], as with the example inputs, since the graph has sizes of the "
            f"module's inputs as constants, but it has {list(value.shape)}"
        )
    return value


def is_named_tensor(node: fx.Node) -> bool:
    """Return whether a node has a name and its value is a tensor."""
    return PATH in node.meta and isinstance(node.meta.get("value"), Tensor)


def _ancestors(nodes: Iterable[fx.Node], ends: Collection[fx.Node]) -> set[fx.Node]:
    """Return ``nodes`` and their ancestors, without going beyond ``ends``."""
    return set(reachable(nodes, lambda node: () if node in ends else node.all_input_nodes))
