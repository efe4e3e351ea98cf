"""Fold and pack convolutions once for all extractors over a model.

All extractors over a model share two copies of its weights: the model's own, and the folded and packed ones.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor, fx, nn

from fxcore.backends.packed import PackedConv2d, can_be_packed
from fxcore.passes.base import fork
from fxcore.passes.fuse_conv_bn import affine_of_module, fused_module, fused_sequence, is_convolution

T = TypeVar("T")


class WeakCache(Generic[T]):
    """A cache that keeps each value only for as long as something else refers to it.

    Threads that ask for the same key at the same time get the same value: only one thread makes values at a time.

    >>> cache: WeakCache[nn.Module] = WeakCache()
    >>> relu = cache.get_or_make("relu", nn.ReLU)
    >>> cache.get_or_make("relu", nn.ReLU) is relu
    True
    >>> del relu
    >>> len(cache)
    0
    """

    def __init__(self) -> None:
        self._values: weakref.WeakValueDictionary[Hashable, T] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get_or_make(self, key: Hashable, make: Callable[[], T | None]) -> T | None:
        """Return the value of ``key``, calling ``make()`` if it is missing. A None from ``make`` is not cached."""
        with self._lock:
            value = self._values.get(key)
            if value is None:
                value = make()
                if value is not None:
                    self._values[key] = value
            return value


# Keys are weak references to the folded modules, and the states of their tensors. The references do not keep a dropped
# model alive, and, unlike ids, a dead one never equals the reference to a new module at the same address.
_folds: WeakCache[nn.Module] = WeakCache()
# Keys are (hash of the values, shape, dtype, device).
_parameters: WeakCache[nn.Parameter] = WeakCache()


def with_shared_folds(module: fx.GraphModule) -> fx.GraphModule:
    """Copy ``module`` with its batch norms folded into convolutions that all extractors over the model share.

    This handles pairs of modules, which are nearly all cases; :func:`~fxcore.passes.fuse_conv_bn.fuse_conv_bn` handles
    the rest.
    """
    made = fork(module)
    for node in list(made.graph.nodes):
        called = made.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, nn.Sequential):
            _retarget(made, node, _shared_fold(called))
        elif isinstance(called, nn.BatchNorm2d) and len(node.args) == 1 and not node.kwargs:
            source = node.args[0]
            conv = made.get_submodule(str(source.target)) if source.op == "call_module" else None
            if type(conv) is nn.Conv2d and len(source.users) == 1 and (fold := _shared_fold(conv, called)) is not None:
                _retarget(made, source, fold)
                node.replace_all_uses_with(source)
                made.graph.erase_node(node)
    made.delete_all_unused_submodules()
    made.recompile()
    return made.eval()


def pack_convolutions(module: fx.GraphModule, of: fx.GraphModule) -> None:
    """Pack the convolutions that ``module`` shares with ``of`` (those without a batch norm), in place.

    Only the graph changes, not the code.
    """
    shared = set(of.modules())
    for node in module.graph.nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if called in shared and type(called) is nn.Conv2d and len(node.args) == 1 and not node.kwargs:
            _retarget(module, node, _shared_fold(called))
    module.delete_all_unused_submodules()


def share_new_tensors(module: nn.Module, own: set[int]) -> None:
    """Replace parameters of ``module`` by equal parameters of other modules; make convolution weights channels_last.

    Args:
        own: addresses of storages whose parameters are left alone.
    """
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.untyped_storage().data_ptr() not in own:
                owner._parameters[name] = _shared_parameter(parameter.detach())


def _retarget(module: fx.GraphModule, node: fx.Node, called: nn.Module | None) -> None:
    """Make ``node`` call ``called``, unless that is None."""
    if called is not None:
        target = f"folded_{str(node.target).replace('.', '_')}_{node.name}"
        module.add_module(target, called)
        node.target = target


def _shared_fold(first: nn.Module, norm: nn.BatchNorm2d | None = None) -> nn.Module | None:
    """Return the shared module that replaces ``first`` and ``norm``; None if nothing can be folded or packed."""
    sources = (first,) if norm is None else (first, norm)
    states = tuple(_state(tensor) for source in sources for tensor in (*source.parameters(), *source.buffers()))
    return _folds.get_or_make((*map(weakref.ref, sources), states), lambda: _fold(first, norm))


def _state(tensor: Tensor) -> tuple[int, int]:
    """Return the address of ``tensor``, and the number of writes to it: a model may be trained between two folds."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _fold(first: nn.Module, norm: nn.BatchNorm2d | None) -> nn.Module | None:
    if isinstance(first, nn.Sequential):
        sequence, pairs = fused_sequence(first)
        return _channels_last(sequence) if pairs else None
    if norm is None:
        return PackedConv2d(first) if can_be_packed(first) else None
    affine = affine_of_module(norm)
    if affine is None or not is_convolution(first) or affine.scale.numel() != first.out_channels:
        return None
    fold = _channels_last(fused_module(first, affine))
    return PackedConv2d(fold) if can_be_packed(fold) else fold


def _channels_last(module: nn.Module) -> nn.Module:
    """Make the 2D convolution weights of ``module`` channels_last. ``module.to`` raises if it has 3D ones too."""
    for parameter in module.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


def _shared_parameter(tensor: Tensor) -> nn.Parameter | None:
    if tensor.ndim == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    channels_at_the_end = [0, *range(2, tensor.ndim), 1] if tensor.ndim > 1 else [0]
    raw = tensor.cpu().permute(channels_at_the_end).contiguous()  # no copy: channels_last memory is in this order
    digest = hashlib.sha256(raw.flatten().view(torch.uint8).numpy().data).digest()
    key = (digest, tuple(tensor.shape), tensor.dtype, tensor.device)
    return _parameters.get_or_make(key, lambda: nn.Parameter(tensor, requires_grad=False))
