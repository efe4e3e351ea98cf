"""Calls in the form that torch's quantization gets right: each of a module of its own, with positional arguments."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

from torch import fx, nn

CONVOLUTION_FUNCTIONS = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)

_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def separate(module: fx.GraphModule) -> None:
    """Give each call of a module with parameters or buffers a copy of its own, and ``get_attr`` nodes their own tensor.

    torch fuses one call with the batch norm or ReLU after it, and puts the fused module in the place of the original,
    for all calls.
    """
    called: set[nn.Module] = set()
    for node in module.graph.find_nodes(op="call_module"):
        target = str(node.target)
        layer = module.get_submodule(target)
        if layer in called and (layer.state_dict() or any(True for _ in layer.buffers())):
            node.target = next(name for n in count(1) if not _has(module, name := f"{target}_{n}"))
            module.add_submodule(node.target, copy.deepcopy(layer))
        called.add(layer)
    for node in module.graph.find_nodes(op="get_attr"):
        owner, _, name = str(node.target).rpartition(".")
        if owner and module.get_submodule(owner) in called:
            tensor = getattr(module.get_submodule(owner), name)
            node.target = next(new for n in count() if not hasattr(module, new := f"_{name}_{n}"))
            setattr(module, node.target, copy.deepcopy(tensor))
    module.recompile()


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


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
