"""The inverse of a function, read off its graph backwards."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.tracing import trace
from fxcore.transforms.base import CannotTransform, add, attribute, hooked

#: functions of one tensor and the functions that undo them; methods go by the same names
_INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "exp": torch.log,
    "log": torch.exp,
    "exp2": torch.log2,
    "log2": torch.exp2,
    "log10": lambda x: 10.0**x,
    "expm1": torch.log1p,
    "log1p": torch.expm1,
    "tanh": torch.atanh,
    "atanh": torch.tanh,
    "sinh": torch.asinh,
    "asinh": torch.sinh,
    "sigmoid": torch.logit,
    "logit": torch.sigmoid,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.square,
    "rsqrt": lambda x: 1 / torch.square(x),
    "clone": torch.clone,
    "contiguous": torch.clone,
}


class NotInvertible(CannotTransform):
    """A node has no inverse, or depends on the input in more than one way; ``node``."""


def invert(function: fx.GraphModule | Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """The inverse of a function of one tensor.

    The function must be a chain in which each step has an inverse: arithmetic with constants (numbers, parameters,
    buffers), exponentials, logarithms and their kin, sigmoid, tanh, permutations of axes, flips and rolls, identity,
    and square linear layers. Where a step is invertible on part of the numbers only (``sqrt``), so is the result.

    Raises:
        NotInvertible: naming the step.

    >>> import torch
    >>> inverse = invert(lambda x: torch.exp(2 * x + 1))
    >>> [n.name for n in inverse.graph.nodes if n.op == "call_function"]
    ['log', 'sub', 'truediv']
    >>> round(float(inverse(torch.exp(torch.tensor(7.0)))), 4)
    3.0
    """
    module = function if isinstance(function, fx.GraphModule) else trace(function)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    node = next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0]
    if len(inputs) != 1 or not isinstance(node, fx.Node):
        raise NotInvertible(
            "only a function of one tensor that returns one tensor has an inverse", transform="invert", node="output"
        )
    dependent = _dependent(module.graph, inputs[0])
    root = fx.GraphModule(module, fx.Graph())
    tracer = fx.proxy.GraphAppendingTracer(root.graph)
    value: Any = fx.Proxy(root.graph.placeholder("value"), tracer)
    while node is not inputs[0]:
        sources = [n for n in node.all_input_nodes if n in dependent]
        places = sum(a is sources[0] for a in (*node.args, *node.kwargs.values())) if sources else 0
        if len(sources) != 1 or places != 1 or sum(u in dependent for u in sources[0].users) != 1:
            raise NotInvertible(
                f"{node.name} depends on the input in {'more than one way' if sources else 'no way'}; "
                "only a chain of invertible steps can be inverted",
                transform="invert",
                node=node.name,
            )
        value = _undo(module, root, node, sources[0], value, tracer)
        node = sources[0]
    root.graph.output(value.node)
    root.graph.lint()
    return fx.GraphModule(root, root.graph, "Inverse").eval()


def _dependent(graph: fx.Graph, source: fx.Node) -> set[fx.Node]:
    found = {source}
    for node in graph.nodes:
        if node.op != "output" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _undo(module: fx.GraphModule, root: fx.GraphModule, node: fx.Node, source: fx.Node, value: Any, tracer: Any) -> Any:
    """``value`` before ``node`` did what it does."""

    def fixed(argument: Any) -> Any:
        """An argument that does not depend on the input, in the inverse's own graph."""
        if not isinstance(argument, fx.Node):
            return argument
        if argument.op != "get_attr":
            raise NotInvertible(
                f"{argument.name} is computed; run fold_constants first", transform="invert", node=argument.name
            )
        constant = attribute(module, str(argument.target))
        return fx.Proxy(root.graph.get_attr(add(root, f"constant_{argument.name}", constant)), tracer)

    if node.op == "call_module":
        return _undo_module(root, node, module.get_submodule(str(node.target)), value, tracer)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    others = [a for a in node.args if a is not source]
    first = bool(node.args) and node.args[0] is source
    if name in _INVERSES and not others:
        return _INVERSES[name](value)
    if name in ("add", "sub", "mul", "truediv", "div", "true_divide", "pow") and len(others) == 1 and not node.kwargs:
        if _loses(name, first, others[0]):
            raise NotInvertible(f"{node.name}: many inputs give one output", transform="invert", node=node.name)
        other = fixed(others[0])
        if name == "pow":
            return _undo_power(node, other, first, value)
        return _ARITHMETIC[name, first](value, other)
    if name in ("permute", "transpose", "swapaxes", "flip", "roll", "t"):
        return _undo_move(name, others, node.kwargs, value, node)
    raise NotInvertible(f"{node.name} ({name}) has no inverse that is known here", transform="invert", node=node.name)


# Keyed by the function's name and whether the input is its first argument.
_ARITHMETIC: dict[tuple[str, bool], Callable[[Any, Any], Any]] = {
    ("add", True): operator.sub,
    ("add", False): operator.sub,
    ("sub", True): operator.add,
    ("sub", False): lambda y, c: c - y,
    ("mul", True): operator.truediv,
    ("mul", False): operator.truediv,
}
for _name in ("truediv", "div", "true_divide"):
    _ARITHMETIC[_name, True] = operator.mul
    _ARITHMETIC[_name, False] = lambda y, c: c / y


def _loses(name: str, first: bool, number: Any) -> bool:
    """Whether arithmetic with this number has no inverse: ``x * 0``, ``0 / x``, and ``c ** x`` unless c is positive
    and not 1."""
    if not isinstance(number, (int, float)):
        return False
    if name == "pow":
        return not first and (number <= 0 or number == 1)
    return number == 0 and (name == "mul" or (name not in ("add", "sub") and not first))


def _undo_power(node: fx.Node, other: Any, first: bool, value: Any) -> Any:
    if not first:  # c ** x
        return torch.log(value) / (math.log(other) if isinstance(other, (int, float)) else torch.log(other))
    if isinstance(other, int) and other % 2 == 1:
        return torch.sign(value) * torch.abs(value) ** (1 / other)
    raise NotInvertible(
        f"{node.name}: an even or fractional power has two roots or none", transform="invert", node=node.name
    )


def _undo_move(name: str, rest: list[Any], kwargs: dict[str, Any], value: Any, node: fx.Node) -> Any:
    if kwargs:
        raise NotInvertible(f"{node.name}: give its arguments by position", transform="invert", node=node.name)
    dims = list(rest[0]) if rest and isinstance(rest[0], (list, tuple)) else rest
    if name == "permute":
        axes = [d % len(dims) for d in dims]
        return value.permute(*[axes.index(i) for i in range(len(axes))])
    if name == "roll":
        shifts, where = rest if len(rest) == 2 else (rest[0], None)
        back = tuple(-s for s in shifts) if isinstance(shifts, (list, tuple)) else -shifts
        return torch.roll(value, back) if where is None else torch.roll(value, back, where)
    if name == "t":
        return value.t()
    return torch.flip(value, dims) if name == "flip" else value.transpose(*dims)


def _undo_module(root: fx.GraphModule, node: fx.Node, module: nn.Module, value: Any, tracer: Any) -> Any:
    # A subclass may do more, and so may a hook.
    kind = None if hooked(module) else type(module)
    if kind in (nn.Identity, nn.Dropout):
        return value
    if kind in (nn.Tanh, nn.Sigmoid):
        return _INVERSES[kind.__name__.lower()](value)
    if kind is nn.Linear and isinstance(module, nn.Linear) and module.in_features == module.out_features:
        weight = module.weight.detach()
        inverse, problem = torch.linalg.inv_ex(weight.double())
        if int(problem) != 0:
            raise NotInvertible(f"the weight of {node.target} is singular", transform="invert", node=node.name)
        biased = module.bias is not None
        made = nn.Linear(module.in_features, module.out_features, biased, device=weight.device, dtype=weight.dtype)
        made.weight = nn.Parameter(inverse.to(weight.dtype), requires_grad=False)
        if biased:
            shift = -(inverse @ module.bias.detach().double())
            made.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
        target = add(root, f"{str(node.target).replace('.', '_')}_inverse", made)
        return tracer.create_proxy("call_module", target, (value,), {})
    raise NotInvertible(
        f"{node.target} ({type(module).__name__}) has no inverse that is known here", transform="invert", node=node.name
    )
