"""In-place operations → out-of-place ones, so that no node's value depends on what runs after it.

An in-place ReLU after a batch norm overwrites the batch norm's output: a client that asks for both would get the same
tensor twice (and a client that asks for one alone would get another value). The rewritten graph computes what the
original computes, and every node keeps its own value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.tracing.tracer import PATH, public_name
from fxcore.transforms.base import CannotTransform, add, bare_copy, transform
from fxcore.transforms.writes import memory_of, mutated_argument, pure_target, written

# In ``node.meta`` of a node that writes, and writes to a copy made for it alone.
_ON_COPY = "on_copy"


@transform
def out_of_place(module: fx.GraphModule) -> int:
    """Turn in-place operations, in the graph and in the modules it calls, into ones that leave their input as it is.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True)).eval())
    >>> out_of_place(model).get_submodule("1")
    ReLU()
    """
    count = functionalize(module.graph, dict(module.named_modules()))
    made: dict[int, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        called = module.get_submodule(str(node.target))
        pure = _pure_module(called)
        if pure is not called:
            if id(called) not in made:
                made[id(called)] = add(module, str(node.target), pure)
            node.target = made[id(called)]
    return count


def _pure_module(module: nn.Module) -> nn.Module:
    """``module`` itself, or a copy with the same parameters if it or a part of it works in place."""
    if isinstance(module, fx.GraphModule):
        return module  # its graph would have to be rewritten too; no model has one inside
    children = {name: child and _pure_module(child) for name, child in module._modules.items()}
    in_place = getattr(module, "inplace", None) is True
    if not in_place and all(child is module._modules[name] for name, child in children.items()):
        return module
    made = bare_copy(module)
    made.__dict__["_modules"] = children
    if in_place:
        made.inplace = False  # type: ignore[assignment]
    return made


def functionalize(graph: fx.Graph, modules: dict[str, nn.Module]) -> int:
    """Rewrite in-place operations in ``graph``, which should be a copy.

    Args:
        graph: any traced graph. Where it has been annotated, writes hidden in functions that fx does not look into
            are seen too, and it is known what is a view of what.
        modules: the traced model's modules by path, to see which are in-place. A ``call_module`` node is left as it is:
            the caller sets ``inplace = False`` on the modules that will run, since other graphs share them.

    Returns:
        Number of operations that were in-place.

    Raises:
        CannotTransform: a node is read after a write to its memory, and how it is a view of that memory is not known.
    """
    count = _Functionalizer(graph, modules).run()
    graph.lint()
    return count


class _Functionalizer:
    """Follows the memory that nodes share.

    A node that reads a view after a write has to see what was written. The first node in a memory is its root. Each
    write gives the memory a new root, a node that holds the whole memory after the write. Views that were made before
    the write and are read after it are made again, of the new root.
    """

    def __init__(self, graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
        self.graph = graph
        self.rank = {node: i for i, node in enumerate(graph.nodes)}
        self.inputs = {node: node.all_input_nodes for node in graph.nodes}
        self.memory = memory_of(graph, modules)
        self.sharing: dict[int, list[fx.Node]] = {}
        for node, places in self.memory.items():
            for place in places:
                self.sharing.setdefault(place, []).append(node)
        self.roots = {place: next(filter(_is_tensor, nodes), nodes[0]) for place, nodes in self.sharing.items()}
        #: node that writes → the nodes that it overwrites, and whether its target says so
        self.writes: dict[fx.Node, tuple[list[fx.Node], bool]] = {}
        for node in graph.nodes:
            base = mutated_argument(node, modules)
            seen = [self.inputs[node][i] for i in node.meta.get("mutates", ())]
            if (base is not None or seen) and _ON_COPY not in node.meta:
                self.writes[node] = ([base], True) if base is not None else (seen, False)
        #: node → the node that has replaced it
        self.now: dict[fx.Node, fx.Node] = {}

    def run(self) -> int:
        for node, (overwritten, known) in self.writes.items():
            if known and self._make_pure(overwritten[0], node):
                self._replace(overwritten[0], node)
                continue
            places = dict.fromkeys(map(self._place, overwritten))
            copies = [m for place in places for m in self._run_on_copy(node, place)]
            node.meta["mutates"] = [i for i, m in enumerate(node.all_input_nodes) if m in copies]
            node.meta[_ON_COPY] = True
        for node in self.graph.nodes:  # nothing shares memory now, and only copies are written to
            node.meta.pop("memory", None)
            if _ON_COPY not in node.meta:
                node.meta.pop("mutates", None)
        return len(self.writes)

    def _make_pure(self, base: fx.Node, node: fx.Node) -> bool:
        target = pure_target(node)
        if target is None:
            return False
        before = self._value(base)
        operands = [m for m in node.all_input_nodes if m is not before and m.meta.get("carries") is not False]
        if operands and node.op != "call_module" and target is not written:
            # What is overwritten keeps its type, whatever the other operand's.
            with self.graph.inserting_before(node):
                computed = self.graph.create_node(node.op, target, node.args, node.kwargs)
            node.op, node.target, node.args, node.kwargs = "call_method", "type_as", (computed, before), {}
        else:
            node.target = target
        if node.op == "call_function":
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        return True

    def _replace(self, base: fx.Node, node: fx.Node) -> None:
        """Replace ``base`` by ``node``, which is out-of-place now, in all later reads."""
        place = self._place(base)
        others = [m for m in self._read_after(node, place) if self._value(m) is not self._value(base)]
        whole = node
        if others:
            ways = {m: self._way_to(m, place, node) for m in [base, *others]}
            with self.graph.inserting_before(node.next):
                if ways[base]:
                    copy = self._copy(place)
                    put = self.graph.call_method("copy_", (self._follow(ways[base], copy, place), node))
                    put.meta[_ON_COPY] = True
                    whole = self._filled(copy, put)
                again = {m: self._follow(ways[m], whole, place) for m in others}
            self._replace_uses({self.roots[place]: whole, **again}, place)
        self._replace_uses({base: node}, place)
        self.roots[place] = whole

    def _run_on_copy(self, node: fx.Node, place: int) -> list[fx.Node]:
        """Let a function that writes to its arguments write to a copy, which later nodes read. Returns its new
        arguments."""
        given = [m for m in self.inputs[node] if place in self.memory[m]]
        readers = self._read_after(node, place)
        if len({self._value(m) for m in [*given, *readers]}) == 1:
            root = self._value(given[0])
            with self.graph.inserting_before(node):
                copy = self.graph.call_method("clone", (root,))
            ways: dict[fx.Node, list[fx.Node]] = {m: [] for m in [*given, *readers]}
        else:
            root = self.roots[place]
            ways = {m: self._way_to(m, place, node) for m in [*given, *readers]}
            with self.graph.inserting_before(node):
                copy = self._copy(place)
        copies = []
        for m in given:
            with self.graph.inserting_before(node):
                copies.append(self._follow(ways[m], copy, place))
            node.replace_input_with(self._value(m), copies[-1])
        with self.graph.inserting_before(node.next):
            whole = self._filled(copy, node)
            again = {m: self._follow(ways[m], whole, place) for m in readers}
        self._replace_uses({root: whole, **again}, place)
        self.roots[place] = whole
        return copies

    def _read_after(self, node: fx.Node, place: int) -> list[fx.Node]:
        """The nodes of this memory before ``node`` that are read after it, one for each value."""
        order = self._order()
        found: dict[fx.Node, fx.Node] = {}
        for m in self.sharing[place]:
            if self.rank[m] >= self.rank[node]:
                break
            readers = [u for u in self._value(m).users if order[u] > order[node]]
            # A write does not change sizes.
            if any(u.meta.get("carries") is not False or u in self.writes for u in readers):
                found.setdefault(self._value(m), m)
        return list(found.values())

    def _way_to(self, node: fx.Node, place: int, writer: fx.Node) -> list[fx.Node]:
        """The views that lead from the memory's root to ``node``."""
        way: list[fx.Node] = []
        at = node
        while self._value(at) is not self.roots[place]:
            overwritten, known = self.writes.get(at, ([], False))
            sources = [m for m in overwritten or self.inputs[at] if place in self.memory[m]]
            if len(sources) != 1 or (overwritten and not known and not _same_view(at, sources[0])):
                raise CannotTransform(
                    f"{public_name(writer)} overwrites memory that {public_name(node)} reads too, and nothing says how "
                    f"{public_name(at)} comes out of it; let the model clone() what it writes to",
                    transform="out_of_place",
                    node=public_name(node),
                )
            if not overwritten:
                way.append(at)
            at = sources[0]
        return way[::-1]

    def _follow(self, way: Sequence[fx.Node], start: fx.Node, place: int) -> fx.Node:
        """Apply the views of ``way`` to ``start``."""
        for step in way:
            made = self.graph.node_copy(step, lambda m: start if place in self.memory.get(m, ()) else m)  # noqa: B023
            made.meta.pop(PATH, None)
            self.memory[made] = frozenset({place})
            start = made
        return start

    def _copy(self, place: int) -> fx.Node:
        """A copy of the whole memory, with a layout that the same views apply to."""
        first = self.sharing[place][0].meta.get("value")
        plain = not isinstance(first, Tensor) or first.is_contiguous()
        options: dict[str, Any] = {"memory_format": torch.contiguous_format} if plain else {}
        return self.graph.call_method("clone", (self.roots[place],), options)

    def _filled(self, copy: fx.Node, writer: fx.Node) -> fx.Node:
        # Depends on the writer, so that dead code elimination keeps it for the readers of the copy.
        return self.graph.call_function(operator.getitem, ((copy, writer), 0))

    def _replace_uses(self, instead: dict[fx.Node, fx.Node], place: int) -> None:
        """Let the later readers of overwritten nodes read their successors."""
        order = self._order()
        for node, successor in instead.items():
            before, at = self._value(node), order[successor]
            if before is not successor:
                before.replace_all_uses_with(successor, delete_user_cb=lambda u: order[u] > at)  # noqa: B023
            self.memory[successor] = frozenset({place})
            self.now |= {m: successor for m in [before, *self.sharing[place]] if self._value(m) is before}

    def _order(self) -> dict[fx.Node, int]:
        return {n: i for i, n in enumerate(self.graph.nodes)}

    def _place(self, node: fx.Node) -> int:
        return next(iter(self.memory[node]))

    def _value(self, node: fx.Node) -> fx.Node:
        return self.now.get(node, node)


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("value"), (tuple, list))


def _same_view(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("value"), other.meta.get("value")
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
    )
