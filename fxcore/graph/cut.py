"""The part of a graph from some nodes to others.

A cut is a set of nodes to begin at. It separates the outputs if each path from the model's inputs to them goes through
one of its nodes. Numbers that are computed from the sizes of the model's inputs, such as the number of images, are no
such path: they are computed from the cut's own inputs, or are constants.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.errors import FxError
from fxcore.graph.annotate import MANY
from fxcore.tracing.names import PATH, public_name

Scale = tuple[float, int]
"""Scale and zero point of a quantized tensor."""


class OpenCut(FxError):
    """Outputs depend on the model's inputs in a way that the nodes to begin at do not cut; ``missing`` has names of
    nodes that would close it."""


class UnneededInput(FxError):
    """No output depends on a node to begin at, or only through others; ``name``."""


@dataclass
class Part:
    """The part of a graph from some nodes to others.

    Attributes:
        graph: without an output.
        kept: node of the whole graph → its copy, or its placeholder.
        fixed: whether sizes of the model's inputs are constants in it, so that it takes values of one size only.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    kept: dict[fx.Node, fx.Node] = field(default_factory=dict)
    fixed: bool = False


def pruned(whole: fx.Graph, wanted: Iterable[fx.Node]) -> Part:
    """Copy the inputs of ``whole``, and ``wanted`` with all that they depend on."""
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
) -> Part:
    """Copy what lies between ``given`` and ``wanted``, with a placeholder for each of ``given`` in their order.

    Args:
        whole: an annotated graph without in-place operations.
        given: key → node to begin at. A quantized one becomes a placeholder of floats; one with several rows an image a
            placeholder with these in a dimension of their own, ``[N, k, …]``.
        wanted: nodes to end at.
        closing: whether a node may be named as one that would close an open cut.
        scales: of the quantized nodes among ``given``; default: those of their annotations.

    Raises:
        OpenCut: ``wanted`` depend on an input of ``whole`` otherwise than through ``given``.
        UnneededInput: they do not depend on one of ``given``.
    """
    flow = _Flow(whole, set(given.values()))
    needed = _ancestors(wanted, flow.ends)
    if missing := flow.missing(wanted, needed, closing):
        names = [public_name(node) for node in missing]
        raise OpenCut(
            f"the nodes asked for depend on the image beside {', '.join(given)}; give {', '.join(names)} too",
            missing=names,
        )
    for key, node in given.items():
        if node not in needed:
            raise UnneededInput(f"no node that is asked for depends on the input {key!r} beside the others", name=key)
    part = Part()
    taken: set[str] = set()
    for key, node in given.items():
        part.kept[node] = _placeholder(part.graph, key, node, taken)
    numbers = _Numbers(part, next(iter(given.values())))
    for node in given.values():
        value = node.meta["value"]
        if node.meta.get("rows", 1) > 1:
            part.kept[node] = part.graph.call_method("flatten", (part.kept[node], 0, 1))
        if value.is_quantized:
            scale, zero = (scales or {}).get(node) or (value.q_scale(), value.q_zero_point())
            part.kept[node] = part.graph.call_function(
                torch.quantize_per_tensor, (part.kept[node], scale, zero, value.dtype)
            )
    for node in whole.nodes:
        if node in needed and node not in flow.ends:
            part.kept[node] = part.graph.node_copy(node, lambda n: numbers.of(n) if n in flow.numbers else part.kept[n])
    return part


def _placeholder(graph: fx.Graph, key: str, node: fx.Node, taken: set[str]) -> fx.Node:
    """Add an input that stands for ``node``; its name is ``key`` as Python can write it."""
    name = identifier(key)
    while name in taken:
        name += "_"
    taken.add(name)
    made = graph.placeholder(name)
    made.meta = {k: v for k, v in node.meta.items() if k != "mutates"}
    return made


def identifier(name: str) -> str:
    """Return ``name`` as Python can write it."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{name}" if not name or name[0].isdigit() or keyword.iskeyword(name) else name


class _Flow:
    """What reaches each node of a graph that is cut.

    Attributes:
        ends: the nodes that the cut part does not go beyond: those given, and ``numbers``.
        numbers: nodes without tensors, computed from the sizes of the model's inputs.
    """

    def __init__(self, whole: fx.Graph, given: Collection[fx.Node]) -> None:
        self._given = given
        self._fed: set[fx.Node] = set(given)  # depends on the given nodes
        self._open: set[fx.Node] = set()  # depends on the model's inputs beside them
        self.numbers: set[fx.Node] = set()
        for node in whole.nodes:
            if node in given:
                continue
            read = node.all_input_nodes
            beside = not self._open.isdisjoint(read) or not self.numbers.isdisjoint(read) or node.op == "placeholder"
            if beside and not node.meta.get("carries") and _follows_from_sizes(node):
                self.numbers.add(node)
                continue
            if not self._fed.isdisjoint(read):
                self._fed.add(node)
            if not self._open.isdisjoint(read) or node.op == "placeholder":
                self._open.add(node)
        self.ends = {*given, *self.numbers}

    def missing(
        self, wanted: Iterable[fx.Node], needed: Collection[fx.Node], closing: Callable[[fx.Node], bool]
    ) -> list[fx.Node]:
        """Return the nodes that would close the cut, in no order: where what is not cut meets what is, and outputs that
        depend on no given node."""
        unfed = self._open - self._fed
        found: dict[fx.Node, None] = {}
        waiting = [node for node in wanted if node in unfed]
        for node in needed:
            if node in self._open and node in self._fed:
                waiting += [one for one in node.all_input_nodes if one in unfed]
        while waiting:
            node = waiting.pop()
            if closing(node) or node.op == "placeholder":
                found[node] = None
            else:
                waiting += [one for one in node.all_input_nodes if one in self._open]
        return sorted(found)


_READ_FROM_VALUES = ("item", "tolist", "__bool__", "__int__", "__float__", bool, int, float)


def _follows_from_sizes(node: fx.Node) -> bool:
    """Return whether a node's value without tensors follows from the sizes of the model's inputs."""
    if "value" not in node.meta or node.target in _READ_FROM_VALUES:
        return False
    factor, many = node.meta.get(MANY, (1, node.meta["value"]))
    return _follows(node.meta["value"], many, factor)


def _follows(one: Any, many: Any, factor: int) -> bool:
    if isinstance(one, (tuple, list)):
        same = isinstance(many, (tuple, list)) and len(one) == len(many)
        return same and all(_follows(a, b, factor) for a, b in zip(one, many, strict=True))
    if type(one) is int:
        return type(many) is int and many in (one, factor * one)
    return one is None or (isinstance(one, (bool, float, str, torch.dtype, torch.device)) and one == many)


class _Numbers:
    """Values without tensors of the whole graph, in a part of it.

    Args:
        part: gets the nodes that compute them.
        first: the first node that it begins at.
    """

    def __init__(self, part: Part, first: fx.Node) -> None:
        self._part = part
        self._first, self._input = first, part.kept[first]
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
        graph = self._part.graph
        if isinstance(one, torch.device):
            return graph.call_function(getattr, (self._input, "device"))
        if isinstance(one, torch.dtype) and one.is_floating_point and not self._first.meta["value"].is_quantized:
            return graph.call_function(getattr, (self._input, "dtype"))
        if type(one) is not int or one == many:
            self._part.fixed |= type(one) is int
            return one
        count = graph.call_method("size", (self._input, 0))
        rows = 1 if "rows" in self._first.meta else self._first.meta["value"].shape[0]
        if one == rows:
            return count
        count = graph.call_function(operator.mul, (count, one))
        return count if rows == 1 else graph.call_function(operator.floordiv, (count, rows))


def is_named_tensor(node: fx.Node) -> bool:
    """Return whether a node has a name, and a tensor as its value."""
    return PATH in node.meta and isinstance(node.meta.get("value"), Tensor)


def _ancestors(nodes: Iterable[fx.Node], ends: Collection[fx.Node]) -> set[fx.Node]:
    """Return ``nodes`` and all that they depend on, but for what only ``ends`` depend on."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in ends else node.all_input_nodes
    return found
