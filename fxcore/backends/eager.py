"""PyTorch itself, with what costs nothing in values: batch norms folded into convolutions, channels_last, convolutions
packed for oneDNN, activations in place where nobody sees it. In int8, torch.fx's graph mode (:mod:`fxcore.quantize`).

What folding makes anew is shared by all extractors over a model: equal tensors are one tensor, so fifty extractors have
two copies of the weights between them, the model's own and the folded ones, not fifty.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore.backends.backend import Inputs, Options, lowering, storages_of, tensors_of
from fxcore.backends.packed import PackedConv2d, can_be_packed, fuse_what_follows
from fxcore.int8.quantize import missing, quantize
from fxcore.transforms.base import CannotTransform, finish, fork, hooked
from fxcore.transforms.fuse_conv_bn import (
    affine_of_module,
    fuse_conv_bn,
    fused_module,
    fused_sequence,
    is_convolution,
)

_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.LeakyReLU, nn.ELU)
_ACTIVATION_FUNCTIONS = (F.relu, F.relu6, F.hardswish, F.hardsigmoid, F.silu, F.leaky_relu, F.elu)

# Operations whose result is always new memory. A view or an identity would hand the overwriting on to its source.
_MAKE_NEW = (PackedConv2d, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.Linear, nn.LayerNorm)
_FUNCTIONS_THAT_MAKE_NEW = {"add", "mul", "sub", "cat", "conv2d", "linear", "matmul"}

_Norm = weakref.ref[nn.Module] | None

_shared: weakref.WeakValueDictionary[tuple[Any, ...], nn.Parameter] = weakref.WeakValueDictionary()
# Convolution → (its batch norm or None, what runs in their place); kept as long as some extractor runs it.
_folds: weakref.WeakKeyDictionary[nn.Module, list[tuple[_Norm, weakref.ref[nn.Module]]]] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


class Eager:
    """Runs the module's graph operation by operation; every model, device and precision, int8 on CPUs."""

    name = "eager"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if precision == "int8" and device.type != "cpu":
            return f"eager has int8 arithmetic on CPUs, and not on this {device}"
        return missing() if precision == "int8" else None

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> EagerModule | EagerInt8:
        with lowering(self.name):
            return EagerInt8(module, options) if options.precision == "int8" else EagerModule(module)


class EagerModule:
    """A :class:`~fxcore.backends.backend.Lowered` that runs torch."""

    def __init__(self, module: fx.GraphModule) -> None:
        own = set(storages_of(tensors_of(module)))
        folded = with_shared_folds(module)
        try:
            self.module = fuse_conv_bn(folded)
        except CannotTransform:  # functions in train mode, as of models that drop out in eval mode too
            self.module = finish(fork(folded))
        pack_convolutions(self.module, of=module)
        share_new_tensors(self.module, own | set(storages_of(tensors_of(folded))))
        fuse_what_follows(self.module)
        sums_in_place(self.module)
        activations_in_place(self.module)
        self._own = own
        self._channels_last = has_2d_convolutions(self.module)
        self._held = storages_of(tensors_of(self.module))
        self._packed = [called for called in self.module.modules() if isinstance(called, PackedConv2d)]

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        return _run(self.module, inputs, self._channels_last)

    def storages(self) -> dict[int, int]:
        held = self._held.copy()
        for packed in self._packed:
            held |= packed.storages()
        return {at: size for at, size in held.items() if at not in self._own}


class EagerInt8:
    """A :class:`~fxcore.backends.backend.Lowered` of torch's int8 kernels.

    Attributes:
        module: its graph.
        layers: what each layer loses, the one that loses most first.
    """

    def __init__(self, module: fx.GraphModule, options: Options) -> None:
        found = quantize(module, options.calibration)
        self.layers = found.layers
        self.module = found.module
        self._channels_last = has_2d_convolutions(module)
        packed = found.module.state_dict().values()  # weights are packed in memory that no tensor shows
        self._bytes = sum(value.nbytes for value in packed if isinstance(value, Tensor))

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        return _run(self.module, inputs, self._channels_last)

    def storages(self) -> dict[int, int]:
        return {id(self): self._bytes}


def _run(module: fx.GraphModule, inputs: Inputs, channels_last: bool) -> dict[str, Tensor]:
    if channels_last:
        inputs = tuple(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs)
    with torch.inference_mode():
        outputs: dict[str, Tensor] = module(*inputs)
        return outputs


def has_2d_convolutions(module: nn.Module) -> bool:
    """Whether channels_last input is worth making."""
    return any(isinstance(m, (nn.Conv2d, PackedConv2d)) for m in module.modules())


def with_shared_folds(module: fx.GraphModule) -> fx.GraphModule:
    """A copy in which convolutions with their batch norms are ones that other extractors over the model use too.

    It knows pairs of modules, which are nearly all; :func:`fuse_conv_bn` finds the rest.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = fx.GraphModule(module, graph)
    for node in list(graph.nodes):
        called = made.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, nn.Sequential):
            _put(made, node, _fold_of(called, None))
        elif isinstance(called, nn.BatchNorm2d) and len(node.args) == 1 and not node.kwargs:
            source = node.args[0]
            before = made.get_submodule(str(source.target)) if source.op == "call_module" else None
            if type(before) is nn.Conv2d and len(source.users) == 1 and (fold := _fold_of(before, called)) is not None:
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
            _put(module, node, _fold_of(called, None))
    module.delete_all_unused_submodules()
    module.recompile()


def _fold_of(first: nn.Module, norm: nn.BatchNorm2d | None) -> nn.Module | None:
    """``first`` packed, with ``norm`` folded in, or with the batch norms inside it; None where that cannot be done."""
    with _guard:
        known = _folds.setdefault(first, [])
        for other, made in known:
            # A batch norm that has been collected is not the same as none.
            same = other is None if norm is None else other is not None and other() is norm
            if same and (fold := made()) is not None:
                return fold
        fold = None
        if isinstance(first, nn.Sequential):
            sequence, pairs = fused_sequence(first)
            fold = sequence.to(memory_format=torch.channels_last) if pairs else None
        elif norm is None:
            fold = PackedConv2d(first) if can_be_packed(first) else None
        else:
            affine = affine_of_module(norm)
            if affine is not None and is_convolution(first) and affine.scale.numel() == first.out_channels:
                fold = fused_module(first, affine).to(memory_format=torch.channels_last)
                fold = PackedConv2d(fold) if can_be_packed(fold) else fold
        known[:] = [(other, made) for other, made in known if made() is not None]
        if fold is not None:
            known.append((weakref.ref(norm) if norm is not None else None, weakref.ref(fold)))
        return fold


def share_new_tensors(module: nn.Module, own: set[int]) -> None:
    """Replace parameters that are not among the storages ``own`` by equal ones that another module holds already.

    Convolution weights get channels_last memory on the way.
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


def sums_in_place(module: fx.GraphModule) -> None:
    """Let a convolution write into the memory of what is added to it, where that is new memory and nobody reads it
    any more."""
    modules = dict(module.named_modules(remove_duplicate=False))
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in order:
        if node.op == "call_module" and isinstance(modules[str(node.target)], PackedConv2d) and len(node.args) == 2:
            other = node.args[1]
            before = [user for user in other.users if order[user] < order[node]]
            last = len(before) == len(other.users) - 1 and node.args[0] is not other
            if last and all(_makes_new(read, modules) for read in (other, *before)):
                node.kwargs = {**node.kwargs, "overwrite": True}
    module.recompile()


def activations_in_place(module: fx.GraphModule) -> int:
    """Let activations overwrite their input where it is new memory that only they read and that is no output.

    Returns:
        Number of activations that work in place now.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    made: dict[int, nn.Module] = {}
    count = 0
    for node in module.graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or len(source.users) != 1 or not _makes_new(source, modules):
            continue
        path = str(node.target)
        if node.op == "call_module" and type(modules.get(path)) in _ACTIVATIONS and not hooked(modules[path]):
            # A copy: other extractors over this model call the original, and may have tapped its input.
            if id(modules[path]) not in made:
                made[id(modules[path])] = copy.copy(modules[path])
                made[id(modules[path])].inplace = True  # type: ignore[assignment]
            target = f"in_place_{len(made)}_{path.replace('.', '_')}"
            module.add_module(target, made[id(modules[path])])
            node.target = target
            count += 1
        elif node.op == "call_function" and node.target in _ACTIVATION_FUNCTIONS:
            node.kwargs = {**node.kwargs, "inplace": True}
            node.args = node.args[:1] if node.target in (F.relu, F.relu6, F.hardswish) else node.args
            count += 1
    module.delete_all_unused_submodules()
    module.recompile()
    return count


def _makes_new(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        called = modules.get(str(node.target))
        return isinstance(called, _MAKE_NEW) and not hooked(called)  # a hook may give another tensor, or keep this one
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _FUNCTIONS_THAT_MAKE_NEW
