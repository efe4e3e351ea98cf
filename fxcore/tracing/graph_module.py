"""GraphModules that survive pickling unchanged, and the attributes that their nodes read."""

from __future__ import annotations

import operator
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate

_PLAIN = (str, int, float, bool, type(None))

# Attributes that a GraphModule recreates from its graph, and hooks for graph editors.
_MADE = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(vars(nn.Module())) - {"meta"}


class GraphModule(fx.GraphModule):
    """A torch.fx.GraphModule that is pickled with its graph: node names, ``node.meta`` and ``module.meta`` are kept.

    torch.fx pickles the generated code and traces it again on unpickling. That loses names and ``meta``, traces into
    functions that were leaves, and patches ``nn.Module`` for all threads meanwhile. From ``node.meta``, strings,
    numbers and tuples of them are kept.

    >>> import pickle
    >>> from fxcore.tracing.names import names
    >>> from fxcore.tracing.tracer import trace
    >>> from fxcore.transforms import applied, remove
    >>> module = remove(trace(nn.Sequential(nn.Linear(2, 2), nn.Dropout())))
    >>> again = pickle.loads(pickle.dumps(module))
    >>> names(again.graph), [(a.name, a.changes) for a in applied(again)]
    (['input', '0'], [('remove', 1)])
    """

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in vars(self).items() if key not in _MADE}
        nodes = [_written(node) for node in self.graph.nodes]
        tracer = self.graph._tracer_cls
        kept = None if tracer is None or "<locals>" in tracer.__qualname__ else tracer
        return _read, (state, nodes, self.graph._codegen, kept, type(self).__name__)


@dataclass(frozen=True)
class _Reference:
    """A reference by name to a node that is an argument of another node."""

    name: str


@dataclass(frozen=True)
class _Named:
    """A function's qualified name, since pickle cannot import all of torch's functions."""

    name: str


def _written(node: fx.Node) -> tuple[Any, ...]:
    def reference(argument: Any) -> Any:
        return _Reference(argument.name) if isinstance(argument, fx.Node) else argument

    arguments = map_aggregate((node.args, node.kwargs), reference)
    target = node.target if isinstance(node.target, str) else _name(node.target)
    return node.op, target, arguments, node.name, node.type, {k: v for k, v in node.meta.items() if _plain(v)}


def _read(
    state: dict[str, Any], nodes: list[tuple[Any, ...]], codegen: Any, tracer: type[fx.Tracer] | None, name: str
) -> GraphModule:
    graph = fx.Graph(tracer_cls=tracer)
    graph._codegen = codegen
    made: dict[str, fx.Node] = {}

    def value(argument: Any) -> Any:
        return made[argument.name] if isinstance(argument, _Reference) else argument

    for op, target, arguments, node_name, annotation, meta in nodes:
        function = pkgutil.resolve_name(target.name) if isinstance(target, _Named) else target
        args, kwargs = map_aggregate(arguments, value)
        node = graph.create_node(op, function, args, kwargs, node_name, annotation)
        node.meta.update(meta)
        made[node_name] = node
    module = GraphModule(nn.Module(), fx.Graph(), class_name=name)
    vars(module).update(state)
    module.graph = graph
    return module


def _name(function: Callable[..., Any]) -> Any:
    """Return a name that resolves to the function; if there is none, the function itself, to be pickled as it is."""
    module = str(getattr(function, "__module__", None)).replace("torch._ops", "torch.ops")
    for home in (module, "builtins", "torch", "torch.nn.functional", "torch.Tensor"):
        name = f"{home}.{getattr(function, '__name__', '')}"
        try:
            if pkgutil.resolve_name(name) is function:
                return _Named(name)
        except (AttributeError, ImportError, ValueError):
            continue
    return function


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(_plain, value))
    return isinstance(value, _PLAIN)


def set_mode(module: fx.GraphModule, training: bool) -> None:
    """Set the mode of ``module`` and of the containers that torch.fx created for it.

    Other modules are shared with the model, and keep theirs.
    """
    for part in module.modules():
        if part is module or type(part) is nn.Module:
            part.training = training


def called_module(module: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the part of ``module`` that ``node`` calls; None for nodes that call no module."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def attribute(module: nn.Module, target: str) -> Any:
    """Return the attribute that a ``get_attr`` node reads, by its target.

    >>> tuple(attribute(nn.Sequential(nn.Linear(2, 3)), "0.bias").shape)
    (3,)
    """
    return operator.attrgetter(target)(module)
