"""Calls in the form that torch's quantization gets right: each of a module of its own, with positional arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.int8.layers import WEIGHTED, calls_relu, class_of
from fxcore.layer_types import BATCH_NORMS
from fxcore.passes.base import add
from fxcore.tracing.graph_module import attribute
from fxcore.tracing.interpreter import Watcher

CONVOLUTION_FUNCTIONS = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)

INSERTED = "inserted"
"""Key in the ``meta`` of a node that was inserted for torch, which callers do not know."""

_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def part_batch_norms(module: fx.GraphModule, example: Sequence[Tensor]) -> None:
    """Insert an identity before each batch norm that torch cannot fold into the layer before it.

    torch folds along the layer's output channels whatever the dimensions of its value, which is wrong for a linear
    layer on ``[N, L, C]``: the batch norm's channels are L there. It also needs running statistics.

    Args:
        example: inputs of one call, which is run to find the dimensions.
    """
    dimensions = floating_dimensions(module, example)
    for node in module.graph.find_nodes(op="call_module"):
        if not issubclass(class_of(module, node), BATCH_NORMS) or len(node.all_input_nodes) != 1:
            continue
        before = node.all_input_nodes[0]
        if not issubclass(class_of(module, before), WEIGHTED):
            continue
        norm, weight = module.get_submodule(str(node.target)), module.get_submodule(str(before.target)).weight
        if norm.running_mean is None or dimensions[before] != weight.ndim:
            with module.graph.inserting_before(node):
                identity = module.graph.call_function(torch.positive, (before,))
            identity.meta[INSERTED] = True
            node.replace_input_with(before, identity)
    module.recompile()


def floating_dimensions(module: fx.GraphModule, example: Sequence[Tensor]) -> dict[fx.Node, int]:
    """Return the number of dimensions of each node's value that is a floating-point tensor."""
    found: dict[fx.Node, int] = {}

    def note(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            found[node] = value.ndim

    with torch.no_grad():
        Watcher(module, note).run(*example)
    return found


def separate(module: fx.GraphModule) -> dict[str, str]:
    """Give each call of a module with parameters or buffers a copy of its own, and ``get_attr`` nodes their own tensor.

    torch fuses one call with the batch norm or ReLU after it, and puts the fused module in the place of the original,
    for all calls. Only the graph changes, not the code.

    Returns:
        The path of each copy, and that of the module of the first call.
    """
    called: dict[nn.Module, str] = {}
    copies: dict[str, str] = {}
    for node in module.graph.find_nodes(op="call_module"):
        target = str(node.target)
        layer = module.get_submodule(target)
        if layer in called and [*layer.parameters(), *layer.buffers()]:
            node.target = add(module, target, copy.deepcopy(layer))
            copies[node.target] = called[layer]
        called.setdefault(layer, target)
    for node in module.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        owner = target.rpartition(".")[0]
        if owner and module.get_submodule(owner) in called:
            node.target = add(module, target, copy.deepcopy(attribute(module, target)))
    return copies


def share_weights(module: nn.Module, copies: Mapping[str, str]) -> None:
    """Make the copies of :func:`separate` share the packed weights that are equal, once ``module`` is quantized."""
    modules: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
    for path, original in copies.items():
        one, other = modules.get(original), modules.get(path)  # those that are fused into others are gone
        if one is not None and other is not None and hasattr(one, "_weight_bias") and type(one) is type(other):
            (weight, bias), (same, alike) = one._weight_bias(), other._weight_bias()
            if torch.equal(weight, same) and (bias is alike is None or torch.equal(bias, alike)):
                other._packed_params = one._packed_params


def call_functional_relu(module: fx.GraphModule) -> None:
    """Replace calls of ``torch.relu`` and of the method by ``torch.nn.functional.relu``, with a positional argument.

    torch fuses no other into the layer before it. Only the graph changes, not the code.
    """
    for node in filter(calls_relu, module.graph.nodes):
        node.op, node.target = "call_function", nn.functional.relu
        node.args, node.kwargs = tuple(node.all_input_nodes), {}


def pass_positionally(module: fx.GraphModule) -> None:
    """Pass the arguments of functional linear layers and convolutions by position; for convolutions pass all arguments,
    with one number per axis.

    torch passes them on to functions that pack weights, which have no defaults. Only the graph changes, not the code.
    """
    for node in module.graph.find_nodes(op="call_function", target=nn.functional.linear):
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        node.args, node.kwargs = tuple(given[name] for name in ("input", "weight", "bias") if name in given), {}
    for node in module.graph.nodes:
        if node.target in CONVOLUTION_FUNCTIONS:
            axes = CONVOLUTION_FUNCTIONS.index(node.target) + 1
            given = _DEFAULTS | dict(zip(("input", "weight", *_DEFAULTS), node.args, strict=False)) | node.kwargs
            for name in ("stride", "padding", "dilation"):
                if isinstance(given[name], int):
                    given[name] = (given[name],) * axes
            node.args = tuple(given[name] for name in ("input", "weight", *_DEFAULTS))
            node.kwargs = {}
