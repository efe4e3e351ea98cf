"""Invert a function by undoing the steps of its graph in reverse order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore.passes.base import CannotTransform, add, hooked
from fxcore.tracing.graph_module import GraphModule, attribute
from fxcore.tracing.interpreter import Watcher
from fxcore.tracing.names import operation_name
from fxcore.tracing.tracer import trace
from fxcore.tracing.writes import reads_shape

#: inverses of functions and methods of one tensor, by name
_INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "exp": torch.log,
    "log": torch.exp,
    "exp2": torch.log2,
    "log2": torch.exp2,
    "log10": lambda x: 10.0**x,
    "expm1": torch.log1p,
    "log1p": torch.expm1,
    "sin": torch.asin,
    "asin": torch.sin,
    "cos": torch.acos,
    "acos": torch.cos,
    "tan": torch.atan,
    "atan": torch.tan,
    "erf": torch.erfinv,
    "erfinv": torch.erf,
    "acosh": torch.cosh,
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


#: other names of the same functions
_ALIASES = {
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "negative": "neg",
    "expit": "sigmoid",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")

# Above its threshold softplus is x itself, and jumps there by about exp(-threshold), so that two inputs have the same
# output. From this threshold on, they are no further apart than neighbouring float32 numbers.
_MIN_THRESHOLD = 15


class NotInvertible(CannotTransform):
    """The step ``node`` has no inverse, or depends on the input in more than one way."""


def invert(function: fx.GraphModule | Callable[[Tensor], Tensor], example: Tensor | None = None) -> fx.GraphModule:
    """Return the inverse of a function of one tensor.

    The function must be a chain in which each step has an inverse: arithmetic with constants (numbers, parameters,
    buffers), exponentials, logarithms, trigonometric and hyperbolic functions, erf, sigmoid, leaky ReLU, softplus,
    permutations of axes, flips, rolls, reshapes, identity, and square linear layers. The inverse ``g`` of ``f``
    satisfies ``f(g(y)) == y``, up to rounding, if ``y`` is a value of ``f``. ``g(f(x)) == x`` holds if the inputs of
    each step are in a range where the step is one-to-one:

    ========================================  ==========================
    step                                      invertible for inputs in
    ========================================  ==========================
    ``sin``                                   [-pi/2, pi/2]
    ``cos``                                   [0, pi]
    ``tan``                                   (-pi/2, pi/2)
    ``asin``, ``acos``                        [-1, 1]
    ``atanh``, ``erfinv``                     (-1, 1)
    ``acosh``                                 [1, inf)
    ``log``, ``log2``, ``log10``, ``rsqrt``   (0, inf)
    ``log1p``                                 (-1, inf)
    ``sqrt``                                  [0, inf)
    ``logit``                                 (0, 1), or within its eps
    ``reciprocal``, ``c / x``                 all but 0
    the others                                all
    ========================================  ==========================

    Elsewhere ``g`` returns the input in that range with the same value (``sin``, ``cos``, ``tan``), or the function
    itself returns NaN or infinity. Where a function saturates (``tanh``, ``sigmoid``, ``erf`` of large numbers), the
    input is lost to rounding.

    Args:
        function: a Python function, or a graph module.
        example: an input; needed to undo reshapes. The inverse then expects the shape of its output; the first
            dimension may have another size if the reshapes keep it. Steps that broadcast the example have no inverse;
            without an example, the input of such a step is returned in the shape of its output.

    Raises:
        NotInvertible: the step ``node`` has no inverse.
        NotTraceable: see :func:`~fxcore.tracing.tracer.trace`.

    >>> import torch
    >>> inverse = invert(lambda x: torch.exp(torch.tan(x)))
    >>> [n.name for n in inverse.graph.nodes if n.op == "call_function"]
    ['log', 'atan']
    >>> y = torch.arange(1.0, 6.0)
    >>> torch.exp(torch.tan(inverse(y))).round(decimals=4).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0]
    >>> rows = torch.rand(2, 3, 4)
    >>> invert(lambda x: x.flatten(1) * 2, rows)(torch.ones(5, 12)).shape
    torch.Size([5, 3, 4])
    """
    module = function if isinstance(function, fx.GraphModule) else trace(function)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    node = module.graph.output_node().args[0]
    if len(inputs) != 1 or not isinstance(node, fx.Node):
        raise _no_inverse("output", "only a function of one tensor that returns one tensor has an inverse")
    dependent = _dependent(module.graph, inputs[0])
    shapes = _shapes(module, example) if example is not None else {}
    root = fx.GraphModule(module, fx.Graph())
    tracer = fx.proxy.GraphAppendingTracer(root.graph)
    value: Any = fx.Proxy(root.graph.placeholder("value"), tracer)
    while node is not inputs[0]:
        sources = [n for n in node.all_input_nodes if n in dependent]
        places = sum(a is sources[0] for a in (*node.args, *node.kwargs.values())) if sources else 0
        if len(sources) != 1 or places != 1 or sum(u in dependent for u in sources[0].users) != 1:
            raise _no_inverse(
                node.name,
                f"{node.name} {'depends on the input more than once' if sources else 'does not depend on the input'}; "
                "only a chain of invertible steps can be inverted",
            )
        value = _undo(module, root, node, sources[0], value, tracer, shapes)
        node = sources[0]
    root.graph.output(value.node)
    root.graph.lint()
    return GraphModule(root, root.graph, "Inverse").eval()


def _no_inverse(node: str, detail: str) -> NotInvertible:
    return NotInvertible(detail, transform="invert", node=node)


def _dependent(graph: fx.Graph, source: fx.Node) -> set[fx.Node]:
    """Return the nodes whose values depend on the values of the input, not only on its shape."""
    found = {source}
    for node in graph.nodes:
        if node.op != "output" and not reads_shape(node) and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _shapes(module: fx.GraphModule, example: Tensor) -> dict[fx.Node, torch.Size]:
    """Return the shape of each node's value."""
    found: dict[fx.Node, torch.Size] = {}

    def note(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor):
            found[node] = value.shape

    with torch.no_grad():
        Watcher(module, note).run(example)
    return found


def _undo(
    module: fx.GraphModule,
    root: fx.GraphModule,
    node: fx.Node,
    source: fx.Node,
    value: Any,
    tracer: Any,
    shapes: Mapping[fx.Node, torch.Size],
) -> Any:
    """Compute the input of ``node`` from its output ``value``."""

    def fixed(argument: Any) -> Any:
        """Return an argument that does not depend on the input, as a value in the inverse's graph."""
        if not isinstance(argument, fx.Node):
            return argument
        if argument.op != "get_attr":
            raise _no_inverse(
                argument.name,
                f"{argument.name} is computed; only arithmetic with numbers, parameters and buffers can be undone; "
                "fold_constants turns values that depend only on those into buffers",
            )
        constant = attribute(module, str(argument.target))
        return fx.Proxy(root.graph.get_attr(add(root, f"constant_{argument.name}", constant)), tracer)

    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        if type(called) in (nn.Flatten, nn.Unflatten) and not hooked(called):
            return _undo_reshape(node, source, value, shapes)
        return _undo_module(root, node, called, value, tracer)
    name = operation_name(node)
    name = _ALIASES.get(name, name)
    others = [a for a in node.args if a is not source]
    settings = {key: a for key, a in node.kwargs.items() if a is not source}
    first = bool(node.args) and node.args[0] is source
    if name in _INVERSES and not others and settings.keys() <= {"memory_format", "eps"}:
        return _INVERSES[name](value)
    if name in ("add", "sub", "mul", "div", "pow") and len(others) == 1 and settings.keys() <= {"alpha"}:
        number = others[0]
        if isinstance(number, fx.Node) and number.op == "get_attr":
            number = attribute(module, str(number.target))
        if _loses_input(name, first, number):
            raise _no_inverse(node.name, f"{node.name}: many inputs have the same output")
        if source in shapes and shapes[node] != shapes[source]:
            before, after = (" x ".join(map(str, shapes[n])) for n in (source, node))
            raise _no_inverse(
                node.name,
                f"{node.name} broadcasts its input from {before} to {after}; expand the input before the function",
            )
        return _undo_arithmetic(node, name, first, others[0], fixed, settings.get("alpha", 1), value)
    if name == "leaky_relu":
        given = dict(zip(("negative_slope", "inplace"), others, strict=False)) | settings
        return _undo_leaky_relu(node, given.get("negative_slope", 0.01), value)
    if name == "softplus":
        given = dict(zip(("beta", "threshold"), others, strict=False)) | settings
        return _undo_softplus(node, given.get("beta", 1), given.get("threshold", 20), value)
    if name in _RESHAPES and not any(isinstance(a, torch.dtype) for a in (*others, *settings.values())):
        return _undo_reshape(node, source, value, shapes)
    if name in ("permute", "transpose", "flip", "roll", "t"):
        return _undo_move(name, others, settings, value, node)
    raise _no_inverse(node.name, f"{node.name} ({name}) has no known inverse")


def _undo_arithmetic(
    node: fx.Node, name: str, first: bool, number: Any, fixed: Callable[[Any], Any], alpha: Any, value: Any
) -> Any:
    """Compute the input of arithmetic with ``number`` from its output ``value``.

    Args:
        first: whether the input is the first argument.
        alpha: factor applied to the second argument of a sum.
    """
    if not first and alpha == 0:
        raise _no_inverse(node.name, f"{node.name}: many inputs have the same output")
    other = fixed(number)
    if name == "pow":
        return _undo_power(node, other, first, value)
    if name == "mul":
        return value / other
    if name == "div":
        return value * other if first else other / value
    if first:  # x + alpha * other
        step = other if alpha == 1 else alpha * other
        return value - step if name == "add" else value + step
    moved = value - other if name == "add" else other - value  # alpha * x
    return moved if alpha == 1 else moved / alpha


def _loses_input(name: str, first: bool, number: Any) -> bool:
    """Return whether arithmetic with this number, or with an element of this tensor, has no inverse: ``x * 0``,
    ``0 / x``, ``c ** x`` for c <= 0 or c == 1, and all arithmetic with infinity and NaN."""
    if not isinstance(number, (int, float, Tensor)):
        return False
    numbers = number if isinstance(number, Tensor) else torch.tensor(float(number), dtype=torch.float64)
    lost = ~numbers.isfinite()
    if name in ("mul", "div"):
        lost = lost | (numbers == 0)
    if name == "pow" and not first:
        lost = lost | (numbers <= 0) | (numbers == 1)
    return bool(lost.any())


def _undo_leaky_relu(node: fx.Node, slope: Any, value: Any) -> Any:
    if not isinstance(slope, (int, float)) or slope <= 0:
        raise _no_inverse(
            node.name,
            f"{node.name}: many inputs have the same output, since its slope is {slope}",
        )
    return F.leaky_relu(value, 1 / slope)


def _undo_softplus(node: fx.Node, beta: Any, threshold: Any, value: Any) -> Any:
    numbers = isinstance(beta, (int, float)) and isinstance(threshold, (int, float))
    if not numbers or beta <= 0 or threshold < _MIN_THRESHOLD:
        raise _no_inverse(
            node.name,
            f"{node.name}: two inputs may have the same output with beta {beta} and threshold {threshold}; it "
            f"has an inverse for a positive beta and a threshold of at least {_MIN_THRESHOLD}",
        )
    return torch.where(beta * value > threshold, value, value + torch.log(-torch.expm1(-beta * value)) / beta)


def _undo_reshape(node: fx.Node, source: fx.Node, value: Any, shapes: Mapping[fx.Node, torch.Size]) -> Any:
    if source not in shapes:
        raise _no_inverse(
            node.name,
            f"{node.name} can only be undone to a shape that is known; give an example of the input, as in "
            "invert(function, example)",
        )
    before, after = shapes[source], shapes[node]
    kept = before[:1] == after[:1] and before.numel() > 0
    return value.reshape(-1 if kept else before[0], *before[1:]) if before else value.reshape(())


def _undo_power(node: fx.Node, other: Any, first: bool, value: Any) -> Any:
    if not first:  # c ** x
        return torch.log(value) / (math.log(other) if isinstance(other, (int, float)) else torch.log(other))
    if isinstance(other, (int, float)) and other % 2 == 1:
        return torch.sign(value) * torch.abs(value) ** (1 / other)
    raise _no_inverse(node.name, f"{node.name}: an even or fractional power has two roots or none")


def _undo_move(name: str, rest: list[Any], kwargs: dict[str, Any], value: Any, node: fx.Node) -> Any:
    if kwargs:
        raise _no_inverse(node.name, f"{node.name}: pass its arguments by position")
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
    # Compare exact types: a subclass may do more, and so may a hook.
    kind = None if hooked(module) else type(module)
    if kind in (nn.Identity, nn.Dropout):
        return value
    if kind in (nn.Tanh, nn.Sigmoid):
        return _INVERSES[kind.__name__.lower()](value)
    if isinstance(module, nn.LeakyReLU) and kind is nn.LeakyReLU:
        return _undo_leaky_relu(node, module.negative_slope, value)
    if isinstance(module, nn.Softplus) and kind is nn.Softplus:
        return _undo_softplus(node, module.beta, module.threshold, value)
    if kind is nn.Linear and isinstance(module, nn.Linear) and module.in_features == module.out_features:
        weight = module.weight.detach()
        inverse, problem = torch.linalg.inv_ex(weight.double())
        if int(problem) != 0:
            raise _no_inverse(node.name, f"the weight of {node.target} is singular")
        biased = module.bias is not None
        made = nn.Linear(module.in_features, module.out_features, biased, device=weight.device, dtype=weight.dtype)
        made.weight = nn.Parameter(inverse.to(weight.dtype), requires_grad=False)
        if biased:
            shift = -(inverse @ module.bias.detach().double())
            made.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
        target = add(root, f"{str(node.target).replace('.', '_')}_inverse", made)
        return tracer.create_proxy("call_module", target, (value,), {})
    raise _no_inverse(node.name, f"{node.target} ({type(module).__name__}) has no known inverse")
