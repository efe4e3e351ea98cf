"""Names of the nodes of any traced module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

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
        return resolve(self, return_nodes, self._plain)

    def _plain(self, name: str) -> str:
        return without_prefix(name) if self._wrapped and name not in self.by_name else name
