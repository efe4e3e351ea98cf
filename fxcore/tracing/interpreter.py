"""Running a graph node by node."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxcore.errors import FxError


class NotAGraph(FxError):
    """A graph module was needed and something else was given."""


def require_graph(module: Any) -> None:
    """Check that ``module`` is a GraphModule.

    Raises:
        NotAGraph: it is not.
    """
    if not isinstance(module, fx.GraphModule):
        raise NotAGraph(
            f"what runs node by node is a torch.fx.GraphModule, not a {type(module).__name__}; trace the model first"
        )


class Interpreter(fx.Interpreter):
    """torch.fx's interpreter, which also runs graphs whose arguments are lists.

    torch.fx stores lists as immutable ones, and some operators do not take those for lists (swin3d).

    Raises:
        NotAGraph: when it is made of something else than a graph module.

    >>> import torch
    >>> from fxcore import trace
    >>> class Sums(Interpreter):
    ...     def run_node(self, n):
    ...         value = super().run_node(n)
    ...         print(n.name, float(value.sum()))
    ...         return value
    >>> _ = Sums(trace(lambda x: torch.exp(x) * 2)).run(torch.zeros(3))
    x 0.0
    exp 3.0
    mul 6.0
    output 6.0
    """

    def __init__(
        self, module: fx.GraphModule, garbage_collect_values: bool = True, graph: fx.Graph | None = None
    ) -> None:
        require_graph(module)
        super().__init__(module, garbage_collect_values, graph)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return mutable(args), mutable(kwargs)


def mutable(value: Any) -> Any:
    """``value`` with plain lists and dicts for torch.fx's immutable ones.

    >>> graph = fx.symbolic_trace(lambda x: x.sum(dim=[0, 1])).graph
    >>> dims = graph.find_nodes(op="call_method", target="sum")[0].kwargs["dim"]
    >>> type(dims).__name__, type(mutable(dims)).__name__
    ('immutable_list', 'list')
    """
    if isinstance(value, tuple):
        return tuple(mutable(v) for v in value) if type(value) is tuple else value
    if isinstance(value, list):
        return [mutable(v) for v in value]
    if isinstance(value, dict):
        return {k: mutable(v) for k, v in value.items()}
    return value
