"""Folded and packed convolutions, shared by all extractors over a model.

Equal tensors are one tensor: all extractors over a model share two copies of its weights, its own and the folded ones.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.backends.packed import PackedConv2d, can_be_packed
from fxcore.transforms.fuse_conv_bn import affine_of_module, fused_module, fused_sequence, is_convolution

_Folds = weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]

_shared: weakref.WeakValueDictionary[tuple[Any, ...], nn.Parameter] = weakref.WeakValueDictionary()
# First module → last module, which may be the same → the module that replaces them, while an extractor uses it.
_folds: weakref.WeakKeyDictionary[nn.Module, _Folds] = weakref.WeakKeyDictionary()
# Held while folding, so that extractors that are built at the same time share one result.
_guard = threading.Lock()


def with_shared_folds(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with convolutions and batch norms folded into modules that all extractors over the model share.

    It folds pairs of modules, which are nearly all; :func:`fuse_conv_bn` finds the rest.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = fx.GraphModule(module, graph)
    for node in list(graph.nodes):
        called = made.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, nn.Sequential):
            _put(made, node, _folded(called))
        elif isinstance(called, nn.BatchNorm2d) and len(node.args) == 1 and not node.kwargs:
            source = node.args[0]
            before = made.get_submodule(str(source.target)) if source.op == "call_module" else None
            if type(before) is nn.Conv2d and len(source.users) == 1 and (fold := _folded(before, called)) is not None:
                _put(made, source, fold)
                node.replace_all_uses_with(source)
                graph.erase_node(node)
    made.delete_all_unused_submodules()
    made.recompile()
    return made.eval()


def _put(module: fx.GraphModule, node: fx.Node, called: nn.Module | None) -> None:
    if called is not None:
        target = f"folded_{str(node.target).replace('.', '_')}_{node.name}"
        module.add_module(target, called)
        node.target = target


def pack_convolutions(module: fx.GraphModule, of: fx.GraphModule) -> None:
    """Pack the convolutions that ``module`` has in common with ``of``: those that have no batch norm after them."""
    shared = set(of.modules())
    for node in module.graph.nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if called in shared and type(called) is nn.Conv2d and len(node.args) == 1 and not node.kwargs:
            _put(module, node, _folded(called))
    module.delete_all_unused_submodules()
    module.recompile()


def _folded(first: nn.Module, norm: nn.BatchNorm2d | None = None) -> nn.Module | None:
    """The module that replaces ``first``, and ``norm`` after it; one for all callers.

    Returns:
        None if nothing can be folded or packed.
    """
    last = first if norm is None else norm
    with _guard:
        known = _folds.setdefault(first, weakref.WeakKeyDictionary())
        fold = made() if (made := known.get(last)) is not None else None
        if fold is None and (fold := _fold(first, norm)) is not None:
            known[last] = weakref.ref(fold)
        return fold


def _fold(first: nn.Module, norm: nn.BatchNorm2d | None) -> nn.Module | None:
    if isinstance(first, nn.Sequential):
        sequence, pairs = fused_sequence(first)
        return sequence.to(memory_format=torch.channels_last) if pairs else None
    if norm is None:
        return PackedConv2d(first) if can_be_packed(first) else None
    affine = affine_of_module(norm)
    if affine is None or not is_convolution(first) or affine.scale.numel() != first.out_channels:
        return None
    fold = fused_module(first, affine).to(memory_format=torch.channels_last)
    return PackedConv2d(fold) if can_be_packed(fold) else fold


def share_new_tensors(module: nn.Module, own: set[int]) -> None:
    """Replace parameters outside the storages ``own`` by equal ones that another module has already.

    Convolution weights become channels_last.
    """
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.untyped_storage().data_ptr() not in own:
                owner._parameters[name] = _shared_parameter(parameter.detach())


def _shared_parameter(tensor: Tensor) -> nn.Parameter:
    if tensor.ndim == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    channels_at_the_end = [0, *range(2, tensor.ndim), 1] if tensor.ndim > 1 else [0]
    raw = tensor.cpu().permute(channels_at_the_end).contiguous()  # no copy: this is the order of channels_last memory
    digest = hashlib.sha256(raw.flatten().view(torch.uint8).numpy().data).digest()
    key = (digest, tuple(tensor.shape), tensor.dtype, tensor.device)
    with _guard:
        known = _shared.get(key)
        if known is None:
            known = _shared[key] = nn.Parameter(tensor, requires_grad=False)
        return known
