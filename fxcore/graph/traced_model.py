"""Trace a model without weights, and keep everything that does not depend on the input size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fxcore.errors import NotTraceable
from fxcore.graph.head_pooling import declared_pooling
from fxcore.graph.tokens.prefix_tokens import PrefixTokens, declared_prefix
from fxcore.images.preprocessing import Preprocessing
from fxcore.models.entry import FeatureMap, ModelEntry
from fxcore.passes.zero_memory import zero_memory
from fxcore.tracing.constants import made_constants
from fxcore.tracing.names import names
from fxcore.tracing.parts import UntraceablePart, trace_model


@dataclass(frozen=True)
class TracedModel:
    """A traced model.

    Attributes:
        entry: the model.
        weights: canonical weights whose structure was traced; ``random`` for the library's default structure.
        preprocessing: converts images to the model's inputs.
        root: the module that was traced.
        module: the eval graph over ``root``, with parameters on ``device``.
        device: ``meta``, or ``cpu`` for models that do not run on meta tensors: int8 models, and models with a leaf
            that branches on values.
        train_nodes: names of the nodes in train mode, in execution order; empty if it cannot be traced in that mode.
        untraceable: parts of the model that could not be traced.
        feature_maps, prefix_tokens: as declared by the model.
        pooling: see :func:`fxcore.graph.head_pooling.declared_pooling`.
        num_params: number of parameters, including untraceable parts.
        constants: names of attributes for tensors computed from buffers during tracing; values depend on the weights.
        modules: modules by path as traced, including in-place ones.
        tensor_bytes: bytes of tensors that are not on the meta device.
    """

    entry: ModelEntry
    weights: str
    preprocessing: Preprocessing
    root: nn.Module
    module: fx.GraphModule
    device: torch.device
    train_nodes: list[str]
    untraceable: list[UntraceablePart]
    feature_maps: Sequence[FeatureMap]
    prefix_tokens: PrefixTokens | None
    pooling: str | None
    num_params: int
    constants: list[str]
    modules: dict[str, nn.Module]
    tensor_bytes: int


def trace_weightless(entry: ModelEntry, weights: str, *, on_cpu: bool = False) -> TracedModel:
    """Build ``entry`` with the structure of ``weights``, without loading them, and trace it in train and eval mode.

    Args:
        on_cpu: build it with random weights on the CPU, to run it there.

    Raises:
        NotTraceable: no part of the model can be traced.
    """
    model = entry.build(weights) if on_cpu else entry.build_weightless(weights)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    train_nodes = _train_nodes(entry, model)
    graph, root, untraceable = trace_model(entry, model)
    zero_memory(graph)
    constants = made_constants(graph)
    modules = dict(root.named_modules())
    device = torch.device("cpu" if on_cpu or entry.is_quantized(weights) else "meta")
    module = fx.GraphModule(root, graph)
    # A view of a parameter requires a gradient even without autograd, and torch's FLOP counter rejects that.
    module.requires_grad_(False)
    if device.type == "meta":
        module.to("meta")
    held = (*root.state_dict().values(), *(getattr(root, name) for name in constants))
    return TracedModel(
        entry=entry,
        weights=weights,
        preprocessing=entry.preprocessing(weights, entry.input_size),
        root=root,
        module=module,
        device=device,
        train_nodes=train_nodes,
        untraceable=untraceable,
        feature_maps=entry.feature_maps(model),
        prefix_tokens=declared_prefix(model),
        pooling=declared_pooling(model),
        num_params=num_params,
        constants=constants,
        modules=modules,
        tensor_bytes=sum(t.nbytes for t in held if isinstance(t, Tensor) and not t.is_meta),
    )


def _train_nodes(entry: ModelEntry, model: nn.Module) -> list[str]:
    try:
        return names(trace_model(entry, model, training=True)[0])
    except NotTraceable:  # by a drop path or a loss that eval mode, in which it is served, does not run
        return []
