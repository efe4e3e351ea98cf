"""Find NaN, infinity and saturation, and the first node that has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.analysis.samples import plain
from fxcore.nesting import clones, tensors_in
from fxcore.tracing.constants import frozen
from fxcore.tracing.failures.input_mismatch import explain_mismatch
from fxcore.tracing.interpreter import Inputs, Watcher, positional, require_graph
from fxcore.tracing.names import operation_name, public_name

# Bounds of functions that saturate.
_BOUNDS: dict[Any, tuple[float, float]] = {
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "relu6": (0.0, 6.0),
    "softsign": (-1.0, 1.0),
}
_MODULES = {
    nn.Sigmoid: "sigmoid",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Tanh: "tanh",
    nn.ReLU6: "relu6",
    nn.Softsign: "softsign",
}
_NEAR = 1e-3
_SATURATED = 0.99
"""Minimum fraction of saturated elements for a node to count as saturated."""


@dataclass(frozen=True)
class NodeHealth:
    """The health of one node's value.

    Attributes:
        name: torchvision's name of the node, or its fx name.
        nan, inf: number of NaN and of infinite elements.
        largest: the largest finite magnitude.
        saturated: fraction of elements at a bound of a bounded function (sigmoid, tanh, …), or of zeros after a ReLU; 1
            if any element reaches ``limit``.
    """

    name: str
    nan: int
    inf: int
    largest: float
    saturated: float


@dataclass(frozen=True)
class Health:
    """The health of all nodes.

    Attributes:
        nodes: the nodes whose values are floating-point tensors, in execution order.
        first_nan, first_inf, first_saturated: name of the first such node, or None.
        cause: origin of the first NaN or infinity: ``input``, ``weights`` or ``operation``, or None.
        frozen: names of random constants, which were drawn during tracing and are the same in every call.
    """

    nodes: list[NodeHealth]
    first_nan: str | None
    first_inf: str | None
    first_saturated: str | None
    cause: str | None
    frozen: list[str]

    @property
    def healthy(self) -> bool:
        """Whether there is no NaN, no infinity, no saturated node and no random constant."""
        return (self.first_nan, self.first_inf, self.first_saturated, self.frozen) == (None, None, None, [])


def check_health(module: fx.GraphModule, inputs: Inputs, *, limit: float | None = None) -> Health:
    """Run ``module`` once on ``inputs`` and find the first node with NaN, infinity or saturation.

    Args:
        module: a module in eval mode, on the inputs' device.
        inputs: positional arguments, arguments by name, or a single tensor.
        limit: magnitude at which a single element saturates its node, such as ``torch.finfo(torch.float16).max`` to
            check for half precision; by default the largest number of the value's dtype.

    Raises:
        NotAGraph: ``module`` is not a graph module.
        BadTensor: ``module`` does not accept ``inputs``.

    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return torch.relu(torch.log(x))
    >>> found = check_health(fx.symbolic_trace(Net().eval()), torch.tensor([-1.0, 1.0]))
    >>> found.first_nan, found.cause
    ('log', 'operation')
    >>> found = check_health(fx.symbolic_trace(Net().eval()), torch.tensor([0.0, 1.0]))
    >>> found.first_nan, found.first_inf
    (None, 'log')
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.Sigmoid()).eval())
    >>> model.get_parameter("0.weight").data.fill_(100)
    tensor([[100.]])
    >>> check_health(model, torch.ones(1, 1)).first_saturated
    '_1'
    """
    require_graph(module)
    arguments = positional(module, inputs)
    found: dict[fx.Node, NodeHealth] = {}

    def look(node: fx.Node, value: Any) -> None:
        tensors = [plain(t) for t in tensors_in(value) if t.is_floating_point() and t.numel()]
        if tensors and node.op != "output":
            found[node] = _health(module, node, tensors, limit)

    with explain_mismatch(module, arguments), torch.no_grad():
        Watcher(module, look).run(*clones(arguments))  # the module may write to its inputs
    nodes = list(found.values())
    bad = next((n for n, h in found.items() if h.nan or h.inf), None)
    return Health(
        nodes=nodes,
        first_nan=next((h.name for h in nodes if h.nan), None),
        first_inf=next((h.name for h in nodes if h.inf), None),
        first_saturated=next((h.name for h in nodes if h.saturated >= _SATURATED), None),
        cause=_cause(module, bad) if bad is not None else None,
        frozen=[name for name, made in frozen(module.graph).items() if made.random],
    )


def _cause(module: fx.GraphModule, node: fx.Node) -> str:
    """Return the origin of the NaN or infinity in the value of ``node``, the first node that has one."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "weights"
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        if any(
            t.is_floating_point() and not bool(t.isfinite().all()) for t in (*called.parameters(), *called.buffers())
        ):
            return "weights"
    return "operation"


def _health(module: fx.GraphModule, node: fx.Node, tensors: list[Tensor], limit: float | None) -> NodeHealth:
    nan = sum(int(t.isnan().sum()) for t in tensors)
    inf = sum(int(t.isinf().sum()) for t in tensors)
    largest = max(float(t.abs().nan_to_num(0, 0, 0).max()) for t in tensors)
    saturated = max(_saturated(module, node, t, limit) for t in tensors)
    return NodeHealth(public_name(node), nan, inf, largest, saturated)


def _saturated(module: fx.GraphModule, node: fx.Node, value: Tensor, limit: float | None) -> float:
    beyond = value.abs() >= (torch.finfo(value.dtype).max if limit is None else limit)
    if bool(beyond.any()):
        return 1.0  # a single overflowing element makes everything computed from it wrong
    kind = _kind(module, node)
    if kind is None:
        return 0.0
    if kind == "relu":
        return float((value == 0).float().mean())
    low, high = _BOUNDS[kind]
    near = _NEAR * (high - low)
    return float(((value <= low + near) | (value >= high - near)).float().mean())


def _kind(module: fx.GraphModule, node: fx.Node) -> str | None:
    """Return the name of the bounded function that ``node`` applies; None for other nodes."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return "relu" if isinstance(called, nn.ReLU) else _MODULES.get(type(called))
    if node.op not in ("call_function", "call_method"):
        return None
    name = operation_name(node).removesuffix("_")
    return name if name == "relu" or name in _BOUNDS else None
