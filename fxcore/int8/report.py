"""The int8 error of each layer, measured by fake quantization: float operations between roundings.

The output of a layer is rounded after its batch norm and ReLU. Weights are rounded symmetrically per output channel;
rounding before a batch norm is folded in gives the same result, since folding scales whole channels.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.analysis.verify import OutputErrors, output_errors
from fxcore.copies import shallow_copy
from fxcore.int8.calls import CONVOLUTION_FUNCTIONS, pass_positionally
from fxcore.int8.kernels import TRANSPOSED, kind_of
from fxcore.int8.layers import WEIGHTED, computed_by, inline_leaves
from fxcore.passes.base import fork
from fxcore.passes.keep_float import KEPT, named
from fxcore.tensors import Tensors
from fxcore.tracing.interpreter import Interpreter, Watcher
from fxcore.tracing.names import public_name

_SMALLEST_SCALE = float(torch.finfo(torch.float32).eps)
_WEIGHTED_FUNCTIONS = (*CONVOLUTION_FUNCTIONS, nn.functional.linear, *TRANSPOSED)
_SUMS = (operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, torch.add, torch.sub, torch.mul)
_PRODUCTS = (operator.matmul, torch.matmul, torch.bmm, torch.cat)

MEASURED = 2
"""Number of calibration rows that errors are measured on."""


@dataclass(frozen=True)
class LayerError:
    """The error of one layer in int8.

    Attributes:
        name: name of the node, for ``keep`` of :func:`~fxcore.int8.quantize.quantize`; includes fused operations.
        sqnr: signal-to-quantization-noise ratio of the layer alone, in decibels: its inputs are the float model's
            values rounded to int8, and its output is rounded to int8. Infinite if there is no error.
        relative, cosine: the same error as norm of the difference divided by the norm of the float value, and as cosine
            similarity.
        accumulated: the relative error of the layer's value if all layers before it are int8 too.
    """

    name: str
    sqnr: float
    relative: float
    cosine: float
    accumulated: float


@dataclass(frozen=True)
class Rounding:
    """Affine quantization: an integer from ``low`` to ``high`` stands for ``scale * (integer - zero_point)``.

    Calling it rounds a tensor to such values.

    >>> Rounding.between(0.0, 2.55)(torch.tensor([0.012, 1.0, 3.0]))
    tensor([0.0100, 1.0000, 2.5500])
    """

    scale: float
    zero_point: int
    low: int = 0
    high: int = 255

    @classmethod
    def between(cls, least: float, most: float) -> Rounding:
        """Return the eight-bit rounding for values from ``least`` to ``most``, including zero."""
        least, most = min(least, 0.0), max(most, 0.0)
        scale = max((most - least) / 255, _SMALLEST_SCALE)
        return cls(scale, round(-least / scale))

    def __call__(self, x: Tensor) -> Tensor:
        integers = torch.clamp(torch.round(x / self.scale) + self.zero_point, self.low, self.high)
        return (integers - self.zero_point) * self.scale


def layer_errors(
    module: fx.GraphModule, rows: Tensors, roundings: Mapping[str, Rounding], per_channel: bool = True
) -> list[LayerError]:
    """Return the error of each rounded layer, the largest first.

    Args:
        module: a float32 module in eval mode; it is not changed.
        rows: inputs to measure errors on, a few rows.
        roundings: roundings of the inputs and of the value of each int8 layer, by public name.
        per_channel: whether weights have a scale per output channel instead of one per tensor.
    """
    graph = inline_leaves(fork(module))
    pass_positionally(graph)
    with torch.no_grad():
        floats = _values(graph, rows)
        alone = _Rounded(graph, roundings, per_channel, floats, alone=True)
        alone.run(*rows)
        together = _Rounded(graph, roundings, per_channel, floats, alone=False)
        together.run(*rows)
    layers = [
        LayerError(
            name=name,
            sqnr=-20 * math.log10(errors.relative) if errors.relative else math.inf,
            relative=errors.relative,
            cosine=errors.cosine,
            accumulated=together.errors[name].relative,
        )
        for name, errors in alone.errors.items()
    ]
    return sorted(layers, key=lambda layer: layer.sqnr)


def simulated(module: fx.GraphModule, calibration: Sequence[Tensors]) -> list[LayerError]:
    """Return the error of each layer of ``module`` in int8, the largest first, with the ranges of ``calibration``.

    Layers with weights, sums, products, concatenations and activations are int8, except those marked by
    :func:`~fxcore.passes.keep_float.keep_float`.

    Args:
        module: a float32 module in eval mode.
        calibration: calibration inputs, one row each.

    >>> from fxcore import trace
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    >>> sorted(layer.name for layer in simulated(trace(model), [(torch.rand(1, 3, 8, 8),) for _ in range(4)]))
    ['0', '2']
    """
    private = inline_leaves(fork(module))
    graph: fx.Graph = private.graph
    keep: Sequence[str] = module.meta.get(KEPT, ())
    layer = {node: computed_by(private, node) for node in graph.nodes}
    kept = {layer[node] for node in graph.nodes if any(named(node, name) for name in keep)}
    outputs = {
        node.name: public_name(layer[node])
        for node in graph.nodes
        if layer[node] not in kept and _is_int8(private, node, layer[node])
    }
    ranges: dict[str, tuple[float, float]] = {}
    with torch.no_grad():
        for inputs in calibration:
            values = _values(private, inputs)
            for node, name in outputs.items():
                if node in values and values[node].numel():
                    least, most = (float(x) for x in values[node].aminmax())
                    before = ranges.get(name, (least, most))
                    ranges[name] = min(least, before[0]), max(most, before[1])
    few = tuple(torch.cat(parts) for parts in zip(*calibration[:MEASURED], strict=True))
    return layer_errors(module, few, {name: Rounding.between(*ends) for name, ends in ranges.items()})


def _is_int8(module: fx.GraphModule, node: fx.Node, layer: fx.Node) -> bool:
    """Return whether ``node`` is the output of ``layer``, and ``layer`` is an int8 layer or an input."""
    if all(computed_by(module, user) is layer for user in node.users):
        return False
    kind = kind_of(module, layer)
    if layer.op == "placeholder" or kind in (*_WEIGHTED_FUNCTIONS, *_PRODUCTS):
        return kind not in TRANSPOSED
    if kind in _SUMS:
        return len(layer.all_input_nodes) == 2
    if not isinstance(kind, type):
        return False
    return (issubclass(kind, WEIGHTED) and kind not in TRANSPOSED) or kind.__module__ == "torch.nn.modules.activation"


def _values(module: fx.GraphModule, inputs: Tensors) -> dict[str, Tensor]:
    """Return all floating-point values by node name."""
    found: dict[str, Tensor] = {}

    def keep(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and node.op not in ("get_attr", "output"):
            found[node.name] = value.clone() if node.op == "placeholder" else value

    Watcher(module, keep).run(*inputs)
    return found


class _Rounded(Interpreter):
    """An interpreter that rounds the values and weights of int8 layers, and measures their errors.

    Args:
        floats: values of the float module by node name.
        alone: whether each layer gets the float module's values as inputs, instead of those of the layers before it.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        roundings: Mapping[str, Rounding],
        per_channel: bool,
        floats: Mapping[str, Tensor],
        alone: bool,
    ) -> None:
        super().__init__(module)
        self._graph = module
        self._roundings = roundings
        self._per_channel = per_channel
        self._floats = floats
        self._alone = alone
        self.errors: dict[str, OutputErrors] = {}

    def run_node(self, n: fx.Node) -> Any:
        layer = computed_by(self._graph, n)
        name = public_name(layer)
        rounding = self._roundings.get(name)
        if rounding is None:
            return super().run_node(n)
        value = self._with_rounded_weights(n) if n is layer else super().run_node(n)
        if n.name not in self._floats or all(computed_by(self._graph, user) is layer for user in n.users):
            return value
        expected, rounded = self._floats[n.name], rounding(value)
        if layer.op != "placeholder":
            self.errors[name] = output_errors(expected, rounded)
        return rounding(expected) if self._alone else rounded

    def _with_rounded_weights(self, n: fx.Node) -> Any:
        if n.op == "call_module":
            called = self.fetch_attr(str(n.target))
            if isinstance(called, WEIGHTED) and "weight" in called._parameters:
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                private = shallow_copy(called)  # other threads may run the original
                rounded = rounded_weight(called.weight, self._per_channel)
                private._parameters["weight"] = nn.Parameter(rounded, requires_grad=False)
                return private(*args, **kwargs)
        elif n.target in _WEIGHTED_FUNCTIONS and len(n.args) > 1:
            (x, weight, *rest), kwargs = self.fetch_args_kwargs_from_env(n)
            return self.call_function(n.target, (x, rounded_weight(weight, self._per_channel), *rest), kwargs)
        return super().run_node(n)


def rounded_weight(weight: Tensor, per_channel: bool = True) -> Tensor:
    """Round ``weight`` ``[out, ...]`` to 256 symmetric steps, per output channel or per tensor."""
    most = weight.abs().amax(tuple(range(1, weight.ndim)), keepdim=True) if per_channel else weight.abs().amax()
    scale = (most / 127.5).clamp_min(_SMALLEST_SCALE)
    return torch.clamp(torch.round(weight / scale), -128, 127) * scale
