"""Prepare a graph for quantization: inline leaves, and find the layers that nodes belong to."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from fxcore.errors import NotTraceable
from fxcore.layer_types import ALL_CONVOLUTIONS, BATCH_NORMS
from fxcore.passes.base import fork
from fxcore.tracing.names import PATH, public_name
from fxcore.tracing.tracer import record

WEIGHTED = (*ALL_CONVOLUTIONS, nn.Linear)


def inline_leaves(module: fx.GraphModule) -> fx.GraphModule:
    """Replace calls to leaves that are not torch.nn's (containers, squeeze-and-excitation, …) by their operations.

    The last node of each gets the name of the leaf. The graph of ``module`` is modified; the result is a
    compiled copy of it.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_module":
            continue
        called = module.get_submodule(str(node.target))
        if type(called).__module__.startswith("torch.nn.") and not isinstance(called, nn.Sequential):
            continue
        try:
            inner, _ = record(called, leaf_modules=[_NoModule])
        except NotTraceable:
            continue  # stays a leaf, in float32
        inputs = [n for n in inner.nodes if n.op == "placeholder"]
        if any(str(n.target).startswith("*") for n in inputs):
            continue  # one node stands for several arguments
        given = dict(zip((n.target for n in inputs), node.args, strict=False)) | node.kwargs
        # Other inputs have a default value.
        copies: dict[fx.Node, Any] = {n: given.get(n.target, *n.args) for n in inputs}
        with graph.inserting_before(node):
            for n in inner.nodes:
                if n.op in ("placeholder", "output"):
                    continue
                made = copies[n] = graph.node_copy(n, copies.__getitem__)
                if n.op in ("call_module", "get_attr"):
                    made.target = f"{node.target}.{n.target}"
                made.meta = {PATH: f"{public_name(node)}.{public_name(n)}"}
        returned: Any = inner.output_node().args[0]
        result = copies[returned]
        if result not in node.all_input_nodes:
            result.meta[PATH] = public_name(node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return fork(module).eval()


class _NoModule(nn.Module):
    """A class without instances. With it as the only leaf class, all modules are traced into."""


def computed_by(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return the layer that ``node`` belongs to.

    A batch norm, ReLU or ReLU6 belongs to the layer before it, which fuses it or, for ReLU6, rounds to its range. If
    other nodes read the layer's value too, that value is rounded by itself, and what follows is a layer of its own.
    """
    while len(node.all_input_nodes) == 1 and len(node.all_input_nodes[0].users) == 1:
        before = node.all_input_nodes[0]
        relu = calls_relu(node) or issubclass(class_of(module, node), nn.ReLU) or is_relu6(module, node)
        if issubclass(class_of(module, node), BATCH_NORMS):
            fused = issubclass(class_of(module, before), WEIGHTED)
        else:
            fused = relu and (
                before.op == "call_function" or issubclass(class_of(module, before), (*WEIGHTED, *BATCH_NORMS))
            )
        if not fused:
            break
        node = before
    return node


def calls_relu(node: fx.Node) -> bool:
    """Return whether ``node`` calls ReLU as a function or as a method."""
    return node.target in (torch.relu, nn.functional.relu) or (node.op == "call_method" and node.target == "relu")


def is_relu6(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether ``node`` calls ReLU6."""
    return node.target is nn.functional.relu6 or issubclass(class_of(module, node), nn.ReLU6)


def class_of(module: fx.GraphModule, node: fx.Node) -> type:
    """Return the class of the module that a node calls; for other nodes, the class of ``module``."""
    return type(module.get_submodule(str(node.target))) if node.op == "call_module" else type(module)


def holds_int8(module: nn.Module) -> bool:
    """Return whether ``module`` has torch's int8 layers, whose packed weights only torch can read."""
    return any(type(part).__module__.startswith("torch.ao.nn.") for part in module.modules())
