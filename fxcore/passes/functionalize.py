"""Rewrite the in-place operations of a graph, so that no node's value changes after it is computed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxcore.passes.base import CannotTransform
from fxcore.passes.memory_formats import ignore_memory_formats
from fxcore.tracing.names import PATH, operation_name, public_name
from fxcore.tracing.writes import (
    IN_PLACE_OPERATORS,
    ON_COPY,
    is_number,
    memory_of,
    mutated_argument,
    possible_memory,
    pure_target,
    written,
)

_CONVERTING = frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal"),
        *("logical_and", "logical_or", "logical_xor", "logical_not"),
        *("cumsum", "cumprod"),
    )
)
"""Operations whose out-of-place form returns booleans for any operands, or 64-bit integers for smaller ones."""

_RESHAPING = ("as_strided", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
"""Operations whose in-place forms change the shape of one tensor, and no memory."""

_NEW_TENSORS = {
    *("chunk", "detach", "diagonal", "expand", "getitem", "movedim", "narrow", "permute", "select", "split"),
    *("transpose", "unbind", "unfold", "unsqueeze", "view"),
}
"""Operations that never return their argument itself."""


def functionalize(graph: fx.Graph, modules: dict[str, nn.Module]) -> int:
    """Rewrite in-place operations in ``graph``, and those that depend on the memory format
    (:func:`~fxcore.passes.memory_formats.ignore_memory_formats`).

    ``torch.func.functionalize`` is not used: it works on ATen operations, and node names would be lost.

    Args:
        graph: any traced graph; it is modified, so pass a copy. If it is annotated, writes hidden in leaf functions are
            found too, and views are known exactly.
        modules: the traced model's modules by path, to find in-place ones. ``call_module`` nodes are left alone: the
            caller must set ``inplace = False`` on the modules that will run, since other graphs share them.

    Returns:
        Number of operations that were in-place.

    Raises:
        CannotTransform: a node is read after a write to its storage, and it is unknown which view of the storage the
            node is; or without annotations, whether it has that storage.
    """
    count = _Functionalizer(graph, modules).run()
    ignore_memory_formats(graph, modules)
    graph.lint()
    return count


class _Write(NamedTuple):
    """The values that a node overwrites.

    Attributes:
        bases: the nodes whose values are overwritten.
        by_name: whether the node's name or arguments show it (``add_``, ``inplace=True``), so that an out-of-place
            target may exist; otherwise the write was observed when the graph was annotated.
    """

    bases: list[fx.Node]
    by_name: bool


class _Aliases:
    """The nodes that share each storage, and the node that currently holds each node's value.

    Attributes:
        storages: ids of the storages of each node's value.
        sharing: the nodes of the original graph that share each storage, in order.
        roots: the node that currently holds the whole of each storage: initially its first tensor, after a write a new
            node.
    """

    def __init__(self, graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
        self.storages = memory_of(graph, modules)
        self.sharing: dict[int, list[fx.Node]] = {}
        for node, storages in self.storages.items():
            for storage in storages:
                self.sharing.setdefault(storage, []).append(node)
        self.roots = {storage: next(filter(_is_tensor, nodes), nodes[0]) for storage, nodes in self.sharing.items()}
        self._replaced_by: dict[fx.Node, fx.Node] = {}

    def storage_of(self, node: fx.Node) -> int:
        return next(iter(self.storages[node]))

    def current(self, node: fx.Node) -> fx.Node:
        """Return the node that currently holds the value of ``node``."""
        return self._replaced_by.get(node, node)

    def replace(self, node: fx.Node, by: fx.Node, storage: int) -> None:
        """Record that ``by`` now holds the value of ``node``, and of all nodes that ``node`` replaced."""
        self.storages[by] = frozenset({storage})
        self._replaced_by |= {m: by for m in [node, *self.sharing[storage]] if self.current(m) is node}


class _Functionalizer:
    """Rewrite a graph, write by write, in execution order.

    A write replaces the root of its storage by a new node, which holds the whole storage after the write. Views that
    are created before the write and read after it are recreated from the new root::

        row = x[0]                   row = x[0]
        row.add_(1)           →      added = row.add(1)
        return x, row                copy = x.clone(); put = copy[0].copy_(added); whole = (copy, put)[0]
                                     return whole, added

    A write without an out-of-place form, such as one inside a function, is applied to a copy of the storage.
    """

    def __init__(self, graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
        self.graph = graph
        self.rank = {node: i for i, node in enumerate(graph.nodes)}
        self.inputs = {node: node.all_input_nodes for node in graph.nodes}
        self.aliases = _Aliases(graph, modules)
        self.writes: dict[fx.Node, _Write] = {}
        # By storage, a node that reshaped one of several values in place. It wrote no memory, so the others stay.
        self._reshaped: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if ON_COPY in node.meta:
                continue
            if node.target in IN_PLACE_OPERATORS and node.meta.get("carries") is False:
                node.target = IN_PLACE_OPERATORS[node.target]  # on numbers, which cannot be written to
            base = mutated_argument(node, modules)
            observed = [self.inputs[node][i] for i in node.meta.get("mutates", ())]
            if base is not None or observed:
                self.writes[node] = _Write([base], True) if base is not None else _Write(observed, False)

        if any("memory" not in base.meta for write in self.writes.values() for base in write.bases):
            self._check_memory(possible_memory(graph, modules))

    def _check_memory(self, possible: Mapping[fx.Node, frozenset[int]]) -> None:
        """Check that the values read after each write share the overwritten memory for sure, or not at all.

        Raises:
            CannotTransform: it is unknown, as of ``y.float()``, which may be ``y`` itself.
        """
        for writer, (bases, _) in self.writes.items():
            for m, storages in possible.items():
                if self.rank[m] >= self.rank[writer]:
                    break
                unknown = any(
                    storages & possible[base] and not self.aliases.storages[m] & self.aliases.storages[base]
                    for base in bases
                )
                if unknown and any(self.rank[user] > self.rank[writer] and not is_number(user) for user in m.users):
                    raise CannotTransform(
                        f"{public_name(writer)} overwrites memory that {public_name(m)}, which is read later, may "
                        "share; let the model clone() what it writes to",
                        transform="out_of_place",
                        node=public_name(m),
                    )

    def run(self) -> int:
        for node, write in self.writes.items():
            if write.by_name and self._make_pure(write.bases[0], node):
                self._substitute(write.bases[0], node)
            else:
                self._write_to_copies(node, write.bases)
        for node in self.graph.nodes:  # now no storage is shared, and only copies are written to
            node.meta.pop("memory", None)
            if ON_COPY not in node.meta:
                node.meta.pop("mutates", None)
        return len(self.writes)

    def _make_pure(self, base: fx.Node, node: fx.Node) -> bool:
        """Replace ``node``'s operation by its out-of-place form; return False if there is none."""
        target = pure_target(node)
        if target is None:
            return False
        before = self.aliases.current(base)
        operands = [m for m in node.all_input_nodes if m is not before and m.meta.get("carries") is not False]
        keeps_dtype = not _same_dtype([before, *operands]) or getattr(target, "__name__", target) in _CONVERTING
        if keeps_dtype and node.op != "call_module" and target is not written:
            # An in-place operation keeps the dtype of the overwritten tensor, whatever the dtype of the other operand.
            with self.graph.inserting_before(node):
                computed = self.graph.create_node(node.op, target, node.args, node.kwargs)
            node.op, node.target, node.args, node.kwargs = "call_method", "type_as", (computed, before), {}
        else:
            node.target = target
        if node.op == "call_function":
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        return True

    def _substitute(self, base: fx.Node, node: fx.Node) -> None:
        """Make later readers of ``base`` read ``node``, which overwrote or reshaped it and is now out-of-place."""
        aliases, storage = self.aliases, self.aliases.storage_of(base)
        current = aliases.current(base)
        others = [m for m in self._read_after(node, storage) if aliases.current(m) is not current]
        whole = node
        if others and operation_name(node) in _RESHAPING:
            self._check_distinct(others, base, node)
            self._reshaped[storage] = node
            self._redirect({base: node}, storage)
            return
        if others:
            self._check_not_reshaped(node, storage)
            views = {m: self._views_from_root(m, storage, node) for m in (base, *others)}
            with self.graph.inserting_before(node.next):
                if views[base]:  # the write goes through a view, so only a part of the storage changes
                    copy = self._clone_storage(storage)
                    put = self.graph.call_method("copy_", (self._apply(views[base], copy, storage), node))
                    put.meta[ON_COPY] = True
                    whole = self._after_write(copy, put)
                again = {m: self._apply(views[m], whole, storage) for m in others}
            self._redirect({aliases.roots[storage]: whole, **again}, storage)
        self._redirect({base: node}, storage)
        aliases.roots[storage] = whole

    def _check_distinct(self, others: Iterable[fx.Node], base: fx.Node, by: fx.Node) -> None:
        """Check that ``others`` are other tensors than ``base``, which ``by`` reshapes.

        Raises:
            CannotTransform: one may be ``base`` itself, as in ``y.contiguous()``.
        """
        for m in others:
            if operation_name(m) not in _NEW_TENSORS and ("value" not in m.meta or _same_view(m, base)):
                raise CannotTransform(
                    f"{public_name(by)} reshapes in place a tensor that {public_name(m)}, which is read later, may be; "
                    f"let the model call {operation_name(by)}() instead",
                    transform="out_of_place",
                    node=public_name(m),
                )

    def _check_not_reshaped(self, writer: fx.Node, storage: int) -> None:
        """Check that ``writer`` does not overwrite memory of several values, one of which was reshaped in place.

        Raises:
            CannotTransform: it does; the values after it are not followed.
        """
        if (reshaped := self._reshaped.get(storage)) is not None:
            raise CannotTransform(
                f"{public_name(writer)} overwrites memory that {public_name(reshaped)} reshaped in place and other "
                f"values share; let the model call {operation_name(reshaped)}() instead",
                transform="out_of_place",
                node=public_name(reshaped),
            )

    def _write_to_copies(self, node: fx.Node, bases: Sequence[fx.Node]) -> None:
        """Pass copies of ``bases`` to ``node``; later readers read the copies."""
        storages = dict.fromkeys(map(self.aliases.storage_of, bases))
        copies = [copy for storage in storages for copy in self._write_to_copy(node, storage)]
        node.meta["mutates"] = [i for i, m in enumerate(node.all_input_nodes) if m in copies]
        node.meta[ON_COPY] = True

    def _write_to_copy(self, node: fx.Node, storage: int) -> list[fx.Node]:
        """Pass a copy of ``storage`` to ``node``; later readers read the copy.

        Returns:
            The new arguments of ``node``.
        """
        aliases = self.aliases
        arguments = [m for m in self.inputs[node] if storage in aliases.storages[m]]
        readers = self._read_after(node, storage)
        values = {aliases.current(m) for m in (*arguments, *readers)}
        if len(values) == 1:  # no other node reads the rest of the storage: copy only this value
            root = values.pop()
            views: dict[fx.Node, list[fx.Node]] = {m: [] for m in (*arguments, *readers)}
            with self.graph.inserting_before(node):
                copy = self.graph.call_method("clone", (root,))
        else:
            self._check_not_reshaped(node, storage)
            root = aliases.roots[storage]
            views = {m: self._views_from_root(m, storage, node) for m in (*arguments, *readers)}
            with self.graph.inserting_before(node):
                copy = self._clone_storage(storage)
        copies = []
        for m in arguments:
            with self.graph.inserting_before(node):
                copies.append(self._apply(views[m], copy, storage))
            node.replace_input_with(aliases.current(m), copies[-1])
        with self.graph.inserting_before(node.next):
            whole = self._after_write(copy, node)
            again = {m: self._apply(views[m], whole, storage) for m in readers}
        self._redirect({root: whole, **again}, storage)
        aliases.roots[storage] = whole
        return copies

    def _read_after(self, node: fx.Node, storage: int) -> list[fx.Node]:
        """Return the nodes of ``storage`` before ``node`` whose values are read after it, one per value."""
        order = self._order()
        found: dict[fx.Node, fx.Node] = {}
        for m in self.aliases.sharing[storage]:
            if self.rank[m] >= self.rank[node]:
                break
            current = self.aliases.current(m)
            readers = [user for user in current.users if order[user] > order[node]]
            # Reading a size does not count, since a write does not change it.
            if any(user.meta.get("carries") is not False or user in self.writes for user in readers):
                found.setdefault(current, m)
        return list(found.values())

    def _views_from_root(self, node: fx.Node, storage: int, writer: fx.Node) -> list[fx.Node]:
        """Return the view operations that lead from the root of ``storage`` to ``node``, in order.

        Raises:
            CannotTransform: an operation on the way has several arguments in this storage, or it is unknown which part
                of the storage it returns; the error names ``writer`` as the reason.
        """
        views: list[fx.Node] = []
        at = node
        while self.aliases.current(at) is not self.aliases.roots[storage]:
            write = self.writes.get(at)
            sources = [m for m in (write.bases if write else self.inputs[at]) if storage in self.aliases.storages[m]]
            unknown = write is not None and not write.by_name and sources and not _same_view(at, sources[0])
            if len(sources) != 1 or unknown:
                raise CannotTransform(
                    f"{public_name(writer)} overwrites memory that {public_name(node)} reads too, and it is not known "
                    f"which part of it {public_name(at)} returns; let the model clone() what it writes to",
                    transform="out_of_place",
                    node=public_name(node),
                )
            if write is None:
                views.append(at)
            at = sources[0]
        return views[::-1]

    def _apply(self, views: Sequence[fx.Node], start: fx.Node, storage: int) -> fx.Node:
        """Apply copies of the operations ``views`` to ``start``, in order."""
        for view in views:
            made = self.graph.node_copy(
                view,
                lambda m: start if storage in self.aliases.storages.get(m, ()) else m,  # noqa: B023
            )
            made.meta.pop(PATH, None)
            self.aliases.storages[made] = frozenset({storage})
            start = made
        return start

    def _clone_storage(self, storage: int) -> fx.Node:
        """Clone the root of ``storage`` in a memory format that the same views apply to."""
        first = self.aliases.sharing[storage][0].meta.get("value")
        plain = not isinstance(first, Tensor) or first.is_contiguous()
        options: dict[str, Any] = {"memory_format": torch.contiguous_format} if plain else {}
        return self.graph.call_method("clone", (self.aliases.roots[storage],), options)

    def _after_write(self, copy: fx.Node, writer: fx.Node) -> fx.Node:
        """Return a node for ``copy`` after ``writer`` has run.

        It depends on both, so that dead code elimination keeps ``writer`` for readers of the copy.
        """
        return self.graph.call_function(operator.getitem, ((copy, writer), 0))

    def _redirect(self, successors: Mapping[fx.Node, fx.Node], storage: int) -> None:
        """Make nodes after each successor read it instead of the value that it replaces."""
        order = self._order()
        for node, successor in successors.items():
            before, at = self.aliases.current(node), order[successor]
            if before is not successor:
                before.replace_all_uses_with(successor, delete_user_cb=lambda user: order[user] > at)  # noqa: B023
            self.aliases.replace(before, successor, storage)

    def _order(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("value"), (tuple, list))


def _same_dtype(nodes: Sequence[fx.Node]) -> bool:
    """Return whether the values of annotated nodes have the same dtype; always True for a single node."""
    values = [node.meta.get("value") for node in nodes]
    return len(nodes) == 1 or len({v.dtype if isinstance(v, Tensor) else object() for v in values}) == 1


def _same_view(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two annotated values have the same shape, strides and offset."""
    a, b = one.meta.get("value"), other.meta.get("value")
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
    )
