"""Eager PyTorch with optimisations that change values only by rounding.

These are: batch norms folded into convolutions, channels_last, convolutions packed for oneDNN, and in-place activations
where no other node reads their input. int8 uses FX graph mode quantization.

All extractors over a model share the folded weights (:mod:`fxcore.backends.folds`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore.backends.backend import Options, lowering, storages_of, tensors_of
from fxcore.backends.folds import pack_convolutions, share_new_tensors, with_shared_folds
from fxcore.backends.packed import PackedConv2d, fuse_post_ops
from fxcore.copies import shallow_copy
from fxcore.int8.quantize import missing, quantize
from fxcore.layer_types import ALL_CONVOLUTIONS, BATCH_NORMS
from fxcore.passes.base import CannotTransform, finish, hooked
from fxcore.passes.fuse_conv_bn import fuse_conv_bn
from fxcore.passes.memory_formats import ignore_memory_formats
from fxcore.tensors import Tensors
from fxcore.tracing.writes import home

_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.LeakyReLU, nn.ELU)
_ACTIVATION_FUNCTIONS = (F.relu, F.relu6, F.hardswish, F.hardsigmoid, F.silu, F.leaky_relu, F.elu)

# Layers (by exact class, as a subclass may return its input) and functions of torch that always allocate their result.
# Overwriting a view or an identity would overwrite its source.
_MAKE_NEW = (PackedConv2d, *ALL_CONVOLUTIONS, *BATCH_NORMS, nn.Linear, nn.LayerNorm)
_FUNCTIONS_THAT_MAKE_NEW = {"add", "mul", "sub", "cat", "conv2d", "linear", "matmul"}


class Eager:
    """Run the graph operation by operation: all models, devices and precisions, but int8 on CPUs only."""

    name = "eager"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if precision == "int8" and device.type != "cpu":
            return f"eager has int8 arithmetic on CPUs only, not on {device}"
        return missing() if precision == "int8" else None

    def lower(self, module: fx.GraphModule, example: Tensors, options: Options) -> EagerModule | EagerInt8:
        with lowering(self.name):
            return EagerInt8(module, options) if options.precision == "int8" else EagerModule(module)


class EagerModule:
    """A :class:`~fxcore.backends.backend.Lowered` that runs torch."""

    grown = 0

    def __init__(self, module: fx.GraphModule) -> None:
        own = set(storages_of(tensors_of(module)))
        folded = with_shared_folds(module)
        try:
            self.module = fuse_conv_bn(folded)
        except CannotTransform:  # e.g. functions in train mode, in models that apply dropout in eval mode too
            self.module = finish(folded)
        # Of these, only the last recompiles.
        ignore_memory_formats(self.module.graph, {})
        pack_convolutions(self.module, of=module)
        share_new_tensors(self.module, own | set(storages_of(tensors_of(folded))))
        fuse_post_ops(self.module)
        sums_in_place(self.module)
        activations_in_place(self.module)
        self._channels_last = has_2d_convolutions(self.module)
        held = storages_of(tensors_of(self.module))
        for called in self.module.modules():
            if isinstance(called, PackedConv2d):
                held |= called.storages()
        self._held = {at: size for at, size in held.items() if at not in own}

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        return _run(self.module, inputs, self._channels_last)

    def storages(self) -> dict[int, int]:
        return self._held.copy()


class EagerInt8:
    """A :class:`~fxcore.backends.backend.Lowered` that runs torch's int8 kernels.

    Attributes:
        module: the int8 graph.
        layers: the error of each layer, the largest first.
    """

    grown = 0

    def __init__(self, module: fx.GraphModule, options: Options) -> None:
        found = quantize(module, options.calibration)
        self.layers = found.layers
        self.module = found.module
        self._channels_last = has_2d_convolutions(module)
        packed = found.module.state_dict().values()  # packed weights are not in a tensor's memory
        self._bytes = sum(value.nbytes for value in packed if isinstance(value, Tensor))

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        return _run(self.module, inputs, self._channels_last)

    def storages(self) -> dict[int, int]:
        return {id(self): self._bytes}


def _run(module: fx.GraphModule, inputs: Tensors, channels_last: bool) -> dict[str, Tensor]:
    if channels_last:
        inputs = tuple(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs)
    with torch.inference_mode():
        outputs: dict[str, Tensor] = module(*inputs)
        return outputs


def has_2d_convolutions(module: nn.Module) -> bool:
    """Return whether ``module`` has 2D convolutions, which are faster on channels_last input."""
    return any(isinstance(m, (nn.Conv2d, PackedConv2d)) for m in module.modules())


def sums_in_place(module: fx.GraphModule) -> None:
    """Make packed convolutions write their sum into the other operand, where that is new memory no later node reads.

    Only the graph changes, not the code.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in order:
        if node.op == "call_module" and isinstance(modules[str(node.target)], PackedConv2d) and len(node.args) == 2:
            other = node.args[1]
            before = [user for user in other.users if order[user] < order[node]]
            last = len(before) == len(other.users) - 1 and node.args[0] is not other
            if last and all(_makes_new(read, modules) for read in (other, *before)):
                node.kwargs = {**node.kwargs, "overwrite": True}


def activations_in_place(module: fx.GraphModule) -> None:
    """Make activations in-place where their input is new memory that no other node reads and is not an output."""
    modules = dict(module.named_modules(remove_duplicate=False))
    made: dict[int, nn.Module] = {}
    for node in module.graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or len(source.users) != 1 or not _makes_new(source, modules):
            continue
        path = str(node.target)
        if node.op == "call_module" and type(modules.get(path)) in _ACTIVATIONS and not hooked(modules[path]):
            # Copy it: other extractors over this model call the original, and may return its input.
            if id(modules[path]) not in made:
                made[id(modules[path])] = shallow_copy(modules[path])
                made[id(modules[path])].inplace = True  # type: ignore[assignment]
            target = f"in_place_{len(made)}_{path.replace('.', '_')}"
            module.add_module(target, made[id(modules[path])])
            node.target = target
        elif node.op == "call_function" and node.target in _ACTIVATION_FUNCTIONS:
            node.kwargs = {**node.kwargs, "inplace": True}
            node.args = node.args[:1] if node.target in (F.relu, F.relu6, F.hardswish) else node.args
    module.delete_all_unused_submodules()
    module.recompile()


def _makes_new(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        called = modules.get(str(node.target))
        if called is None or hooked(called):  # a hook may replace the result, or keep it
            return False
        return type(called) in _MAKE_NEW or (type(called) in _ACTIVATIONS and not called.inplace)
    if node.op == "call_function" and node.target in _ACTIVATION_FUNCTIONS:
        return len(node.args) == 1 and not node.kwargs.get("inplace")
    makes_new = node.op == "call_function" and getattr(node.target, "__name__", "") in _FUNCTIONS_THAT_MAKE_NEW
    return makes_new and home(node.target) in ("torch", "_operator") and "out" not in node.kwargs
