"""Calls in the form that torch's quantization gets right: each of a module of its own, with positional arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from fxcore.passes.base import add
from fxcore.tracing.graph_module import attribute

CONVOLUTION_FUNCTIONS = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)

_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def separate(module: fx.GraphModule) -> dict[str, str]:
    """Give each call of a module with parameters or buffers a copy of its own, and ``get_attr`` nodes their own tensor.

    torch fuses one call with the batch norm or ReLU after it, and puts the fused module in the place of the original,
    for all calls.

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
    module.recompile()
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


def pass_positionally(module: fx.GraphModule) -> None:
    """Give functional convolutions all their arguments, by position and with one number per axis.

    torch passes them on to functions that pack weights, which have no defaults.
    """
    for node in module.graph.nodes:
        if node.target in CONVOLUTION_FUNCTIONS:
            axes = CONVOLUTION_FUNCTIONS.index(node.target) + 1
            given = _DEFAULTS | dict(zip(("input", "weight", *_DEFAULTS), node.args, strict=False)) | node.kwargs
            for name in ("stride", "padding", "dilation"):
                if isinstance(given[name], int):
                    given[name] = (given[name],) * axes
            node.args = tuple(given[name] for name in ("input", "weight", *_DEFAULTS))
            node.kwargs = {}
    module.recompile()
