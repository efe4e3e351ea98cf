"""Transform a graph by running it on proxies."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from torch import fx

from fxcore.passes.base import fork
from fxcore.tracing.graph_module import GraphModule, set_mode
from fxcore.tracing.interpreter import require_graph
from fxcore.tracing.names import PATH, public_name


class Transformer(fx.Transformer):
    """A torch.fx.Transformer whose result keeps names.

    The node that a method returns gets the fx name and ``meta``, including torchvision's name, of the node that the
    method was called for. Other nodes that the method adds get names below it. ``module`` is not changed; the result
    shares its parameters and is in the same mode.

    Args:
        module: a graph module.

    Raises:
        NotAGraph: ``module`` is not a graph module.

    >>> import torch
    >>> from fxcore import trace
    >>> class Doubling(Transformer):
    ...     def call_function(self, target, args, kwargs):
    ...         made = super().call_function(target, args, kwargs)
    ...         return made + made if target is torch.exp else made
    >>> doubled = Doubling(trace(lambda x: torch.exp(x) * 3)).transform()
    >>> [(n.name, n.meta.get("path")) for n in doubled.graph.nodes]
    [('x', 'x'), ('exp_1', 'exp.exp_1'), ('exp', 'exp'), ('mul', 'mul'), ('output', None)]
    >>> float(doubled(torch.tensor(0.0)))
    6.0
    """

    def __init__(self, module: fx.GraphModule) -> None:
        require_graph(module)
        # Copy it, since torch.fx adds tensors that it encounters to the module as attributes.
        super().__init__(fork(module))
        self._made: dict[fx.Node, fx.Node] = {}
        self._below: dict[fx.Node, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        before = next(iter(reversed(self.new_graph.nodes)), None)
        value = super().run_node(n)
        fresh = list(itertools.takewhile(lambda node: node is not before, reversed(self.new_graph.nodes)))[::-1]
        if isinstance(value, fx.Proxy) and value.node in fresh:
            fresh.remove(value.node)
            self._made[value.node] = n
        self._below |= dict.fromkeys(fresh, n)
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Use the path in the graph, so that a module that is used under two names keeps both.
        return self.tracer.create_proxy("call_module", target, args, kwargs)

    def transform(self) -> fx.GraphModule:
        """Run the graph and return the new module.

        Raises:
            Exception: whatever a method raises.
        """
        super().transform()
        self._name()
        source: Any = self.module
        # Copy the graph, so that names of nodes added later do not clash with these; the original does not know them.
        made = GraphModule(source, copy.deepcopy(self.new_graph), class_name=type(source).__name__)
        made.meta.update(source.meta)
        set_mode(made, source.training)
        return made

    def _name(self) -> None:
        taken = {node.name for node in self._made.values()}
        for made, node in self._made.items():
            made.meta = dict(node.meta)
            made.type = node.type
            made.name = node.name
        for made in self.new_graph.nodes:
            if made not in self._made:
                above = self._below.get(made)
                made.name = _free_name(made.name, taken)
                taken.add(made.name)
                if above is not None and made.op != "output":
                    made.meta = {PATH: f"{public_name(above)}.{made.name}"}


def _free_name(name: str, taken: set[str]) -> str:
    """Return ``name``, or if it is taken, the first of ``name_1``, ``name_2``, … that is not."""
    base, _, number = name.rpartition("_")
    if not (base and number.isdigit()):
        base = name
    numbered = (f"{base}_{n}" for n in itertools.count(1))
    return next(one for one in itertools.chain([name], numbered) if one not in taken)
