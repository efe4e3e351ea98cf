"""Names of the nodes of any traced module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fxcore.errors import DuplicateKey, UnknownNode
from fxcore.graph.levels import Level
from fxcore.graph.nodes import resolve
from fxcore.tracing.names import UNTRACEABLE
from fxcore.tracing.parts import UntraceablePart
from fxcore.wrappers import without_prefix


class NodeNames:
    """Names of a traced module's nodes, for :func:`fxcore.graph.nodes.resolve`.

    Args:
        model: name of the module, for errors.
        by_name: observed nodes by name, in execution order.
        wrapped: whether names may have the path prefix of a wrapper around the module.
    """

    def __init__(self, model: str, by_name: dict[str, fx.Node], wrapped: bool = False) -> None:
        self.model = model
        self._wrapped = wrapped
        self.by_name = by_name
        self.eval_nodes = list(by_name)
        self.levels: dict[str, Level] = {}
        self.untraceable = [
            UntraceablePart(str(n.target), n.meta[UNTRACEABLE]) for n in by_name.values() if UNTRACEABLE in n.meta
        ]

    def extractable(self, node: fx.Node) -> bool:
        return bool(node.meta["carries"])

    def resolve(self, return_nodes: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
        """Map each key to an exact name; see :func:`fxcore.graph.nodes.resolve`."""
        pairs = [*(return_nodes.items() if isinstance(return_nodes, Mapping) else enumerate(_listed(return_nodes)))]
        for pair in pairs:
            if not all(isinstance(name, str) for name in (pair if isinstance(return_nodes, Mapping) else pair[1:])):
                raise UnknownNode(
                    f"return_nodes are names, or a dictionary from names to keys, and hold {pair[-1]!r:.100}",
                    name=str(pair[-1])[:100],
                    suggestions=[],
                )
        if not self._wrapped:
            return resolve(self, return_nodes)
        exact: dict[str, str] = {}
        for first, second in pairs:
            name, key = (first, second) if isinstance(return_nodes, Mapping) else (second, second)
            if key in exact:
                raise DuplicateKey(f"the key {key!r} is given twice; each name needs a key of its own", key=key)
            exact |= resolve(self, {name if name in self.by_name else without_prefix(name): key})
        return exact or resolve(self, return_nodes)


def _listed(names: Any) -> Sequence[Any]:
    return names if isinstance(names, Sequence) else [names]
