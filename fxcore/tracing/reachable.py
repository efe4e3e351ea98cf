"""Walk through a graph from node to node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx


def reachable(start: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yield the nodes of ``start`` and those that ``neighbours`` leads to from there, each once and nearest first."""
    waiting = list(dict.fromkeys(start))
    seen = set(waiting)
    for node in waiting:
        yield node
        for other in neighbours(node):
            if other not in seen:
                seen.add(other)
                waiting.append(other)


def with_ancestors(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield ``nodes`` and their ancestors, nearest first."""
    return reachable(nodes, lambda node: node.all_input_nodes)
