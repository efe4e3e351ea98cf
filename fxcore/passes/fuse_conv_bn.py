"""Fold batch norms into the convolutions before them.

In eval mode a batch norm is a scale and a shift per channel, which the weight and bias of a convolution can include.

``torch.fx.experimental.optimization.fuse`` is not used: it handles module pairs of only three classes, is wrong for
modules that are called more than once, loses node names, copies every parameter, and returns torchvision's extractors
in train mode. ``torch.nn.utils.fusion`` is not used either: it scales grouped transposed convolutions along the wrong
axis, and rounds in the model's own precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision import ops

from fxcore.copies import shallow_copy
from fxcore.layer_types import ALL_CONVOLUTIONS, BATCH_NORMS, DROPOUTS
from fxcore.passes.base import add, constant, erase_dead, hooked, replace_modules, transform
from fxcore.passes.channel_views import may_pass_channels, views_keep_channels
from fxcore.tracing.graph_module import called_module
from fxcore.tracing.names import PATH, public_name
from fxcore.tracing.writes import first_input, reads_shape

_NORMS = (*BATCH_NORMS, ops.FrozenBatchNorm2d)
_FUNCTIONS = {F.conv1d: False, F.conv2d: False, F.conv3d: False} | {
    F.conv_transpose1d: True,
    F.conv_transpose2d: True,
    F.conv_transpose3d: True,
}
_NORM_AXES = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3, ops.FrozenBatchNorm2d: 2}
_NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


@dataclass(frozen=True)
class Affine:
    """A batch norm in eval mode, ``x * scale + shift``, both float64 ``[C]``."""

    scale: Tensor
    shift: Tensor


@transform
def fuse_conv_bn(module: fx.GraphModule) -> int:
    """Fold each batch norm into the convolution before it.

    Convolutions may have one to three dimensions, be transposed, and be modules or functions; batch norms may be
    modules (including frozen ones) or ``F.batch_norm``. Between the two there may be dropout, identity, or views that
    keep dimensions 0 and 1. Pairs inside sequential leaf modules such as ``Conv2dNormActivation`` are folded too. A
    convolution whose value has other readers, or is an output, is not fused; nor is one without a batch dimension,
    whose channels are not the batch norm's, if the graph is annotated or the dimensions of the two layers differ. The
    fused node has the batch norm's names; the convolution's names disappear with its value.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval())
    >>> fused = fuse_conv_bn(model)
    >>> [type(m).__name__ for m in fused.children()]
    ['Conv2d', 'ReLU']
    """
    made: dict[tuple[Any, ...], str] = {}
    count = _fuse_inside_leaves(module)
    for node in list(module.graph.nodes):
        affine = affine_of(module, node)
        if affine is None:
            continue
        between = _path_to_convolution(module, node, affine.scale.numel())
        if between is None:
            continue
        convolution = between[-1]
        key = (*operation_of(convolution), *operation_of(node))
        _scale_convolution(module, convolution, affine, made, key)
        replace_norm(module, node, between)
        count += 1
    return count


def affine_of(module: fx.GraphModule, node: fx.Node) -> Affine | None:
    """Return the scale and shift of ``node`` if it is a batch norm with fixed statistics, else None."""
    if (called := called_module(module, node)) is not None:
        return affine_of_module(called) if len(node.all_input_nodes) == 1 else None
    if node.op == "call_function" and node.target is F.batch_norm:
        given = _arguments(node)
        try:
            mean, var, weight, bias = (constant(module, given.get(k)) for k in _NORM_ARGUMENTS[1:5])
        except LookupError:
            return None
        if given.get("training", False) is not False or mean is None or var is None:
            return None
        return _affine(mean, var, weight, bias, float(given.get("eps", 1e-5)))
    return None


def affine_of_module(module: nn.Module) -> Affine | None:
    """Return the scale and shift of ``module`` if it is a batch norm with fixed statistics, else None."""
    if type(module) not in _NORMS or hooked(module):
        return None
    # Without running statistics, a batch norm uses the batch's statistics even in eval mode.
    if module.training and not isinstance(module, ops.FrozenBatchNorm2d):
        return None
    mean, var = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor):
        return None
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return _affine(mean, var, weight, bias, float(module.eps))  # type: ignore[arg-type]


def _affine(mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Affine:
    scale = torch.rsqrt(var.double() + eps)
    if weight is not None:
        scale = scale * weight.double()
    shift = -mean.double() * scale
    return Affine(scale, shift if bias is None else shift + bias.double())


def scaled(
    weight: Tensor, bias: Tensor | None, affine: Affine, transposed: bool, groups: int
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return weight and bias of a convolution or linear layer followed by ``affine``, in the dtype of ``weight``."""
    if transposed:  # [in, out / groups, ...]: each group of inputs computes its own outputs
        grouped = weight.double().view(groups, -1, *weight.shape[1:])
        per_output = affine.scale.view(groups, 1, -1, *[1] * (weight.ndim - 2))
        new_weight = (grouped * per_output).flatten(0, 1)
    else:
        new_weight = weight.double() * affine.scale.view(-1, *[1] * (weight.ndim - 1))
    new_bias = affine.shift if bias is None else bias.double() * affine.scale + affine.shift
    # Casting may change the memory format; copy into a tensor like ``weight`` to keep channels_last.
    new_weight = torch.empty_like(weight).copy_(new_weight)
    return nn.Parameter(new_weight, requires_grad=False), nn.Parameter(new_bias.to(weight.dtype), requires_grad=False)


def fused_module(convolution: nn.Module, affine: Affine) -> nn.Module:
    """Return a copy of ``convolution`` with ``affine`` folded in."""
    assert isinstance(convolution, ALL_CONVOLUTIONS)
    made = shallow_copy(convolution)
    made.weight, made.bias = scaled(
        convolution.weight, convolution.bias, affine, convolution.transposed, convolution.groups
    )
    return made


def is_convolution(module: nn.Module) -> bool:
    """Return whether ``module`` is exactly one of torch's convolutions: no subclass, no parametrisation, no hooks."""
    return type(module) in ALL_CONVOLUTIONS and not hooked(module)


def _fuse_inside_leaves(module: fx.GraphModule) -> int:
    """Fold pairs inside sequential modules that the graph calls as leaves; return the number of pairs."""
    count = 0

    def fused(leaf: nn.Module) -> nn.Module:
        nonlocal count
        made, pairs = fused_sequence(leaf)
        count += pairs
        return made

    replace_modules(module, fused)
    return count


def fused_sequence(module: nn.Module) -> tuple[nn.Module, int]:
    """Copy ``module`` with the pairs in it folded if it is sequential; return the copy and the number of pairs."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return module, 0
    children: dict[str, nn.Module] = {}
    count = 0
    last = ""
    for name, child in module._modules.items():
        if child is None:
            continue
        affine = affine_of_module(child)
        before = children.get(last)
        if (
            affine is not None
            and before is not None
            and is_convolution(before)
            and _channels(before) == affine.scale.numel()
        ):
            children[last] = fused_module(before, affine)
            count += 1
            continue
        children[name], inner = fused_sequence(child)
        count += inner
        if type(child) not in (nn.Identity, nn.Dropout) or hooked(child):
            last = name
    if not count:
        return module, 0
    made = shallow_copy(module)
    made.__dict__["_modules"] = children
    return made, count


def _channels(convolution: nn.Module) -> int:
    return int(convolution.out_channels)  # type: ignore[arg-type]


def _path_to_convolution(module: fx.GraphModule, norm: fx.Node, channels: int) -> list[fx.Node] | None:
    """Return the nodes from the one before ``norm`` back to a convolution with ``channels`` output channels, in that
    order; None if there is no such convolution, or a node on the way has other readers."""
    path: list[fx.Node] = []
    node = first_input(norm)
    while node is not None:
        path.append(node)
        readers = [user for user in node.users if not reads_shape(user)]
        if len(readers) != 1:
            return None  # a branch, or an output
        out_channels = _out_channels(module, node)
        if out_channels is not None:
            fits = out_channels == channels and _is_batched(module, path, norm)
            return path if fits and views_keep_channels(module, path, channels) else None
        if not may_pass_channels(module, node):
            return None
        node = first_input(node)
    return None


def _is_batched(module: fx.GraphModule, path: Sequence[fx.Node], norm: fx.Node) -> bool:
    """Return whether the convolution at the end of ``path`` has a batch dimension, as far as the graph shows it."""
    convolution = path[-1]
    shape = getattr(convolution.meta.get("value", convolution.meta.get("tensor_meta")), "shape", None)
    if convolution.op == "call_module":
        weight = module.get_submodule(str(convolution.target)).weight
    else:
        weight = constant(module, _arguments(convolution)["weight"])
    assert isinstance(weight, Tensor)
    if shape is not None:
        return len(shape) == weight.ndim
    nodes = (norm, *path[:-1])
    called, *between = (type(called_module(module, n)) for n in nodes)
    reshaped = any(kind not in (nn.Identity, *DROPOUTS) for kind in between)
    return reshaped or _NORM_AXES.get(called, weight.ndim - 2) == weight.ndim - 2


def _out_channels(module: fx.GraphModule, node: fx.Node) -> int | None:
    """Return the output channels of ``node`` if it is a convolution with fixed weights, else None."""
    if (called := called_module(module, node)) is not None:
        return _channels(called) if is_convolution(called) else None
    if node.op == "call_function" and node.target in _FUNCTIONS:
        given = _arguments(node)
        try:
            weight = constant(module, given["weight"])
            constant(module, given.get("bias"))
        except (KeyError, LookupError):
            return None
        if not isinstance(weight, Tensor) or not isinstance(given.get("groups", 1), int):
            return None
        return weight.shape[1] * given.get("groups", 1) if _FUNCTIONS[node.target] else weight.shape[0]
    return None


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call to ``F.batch_norm`` or to a convolution function, by name."""
    names: tuple[str, ...] = _NORM_ARGUMENTS
    if node.target in _FUNCTIONS:
        names = _TRANSPOSED_ARGUMENTS if _FUNCTIONS[node.target] else _CONV_ARGUMENTS
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def operation_of(node: fx.Node) -> tuple[Any, ...]:
    """Return a key of the node's operation and fixed arguments; it is equal for calls that differ only in the input."""
    given = {} if node.op == "call_module" else _arguments(node)
    values = {k: str(v.target) if isinstance(v, fx.Node) else repr(v) for k, v in given.items() if k != "input"}
    return (node.op, str(node.target), *sorted(values.items()))


def _scale_convolution(
    module: fx.GraphModule, node: fx.Node, affine: Affine, made: dict[tuple[Any, ...], str], key: tuple[Any, ...]
) -> None:
    """Fold ``affine`` into the convolution ``node``. A pair called several times, with the same ``key``, is folded
    once."""
    if node.op == "call_module":
        if key not in made:
            convolution = module.get_submodule(str(node.target))
            made[key] = add(module, str(node.target), fused_module(convolution, affine))
        node.target = made[key]
        return
    given = _arguments(node)
    old_weight, old_bias = constant(module, given["weight"]), constant(module, given.get("bias"))
    weight, bias = scaled(old_weight, old_bias, affine, _FUNCTIONS[node.target], given.get("groups", 1))  # type: ignore[index]
    home = str(given["weight"].target)
    if key not in made:
        made[key] = add(module, home, weight)
        made[(*key, "bias")] = add(module, home.rsplit("weight", 1)[0] + "bias", bias)
    previous = [n for n in node.all_input_nodes if n.op == "get_attr"]
    with module.graph.inserting_before(node):
        given["weight"] = module.graph.get_attr(made[key])
        given["bias"] = module.graph.get_attr(made[(*key, "bias")])
    node.args = (given.pop("input"),)
    node.kwargs = given
    erase_dead(module, *previous)


def replace_norm(module: fx.GraphModule, norm: fx.Node, path: Sequence[fx.Node]) -> None:
    """Replace ``norm`` by the node before it, which now computes its value and gets its names.

    Args:
        path: the nodes from the one before ``norm`` back to the convolution. All but the first have values that do not
            exist in the original, and get names below the batch norm's.
    """
    before = path[0]
    statistics = [n for n in norm.all_input_nodes if n is not before]
    norm.replace_all_uses_with(before, propagate_meta=False)
    before.meta = dict(norm.meta)
    module.graph.erase_node(norm)
    for node in path[1:]:
        node.meta[PATH] = f"{public_name(before)}.{node.name}"
        node._rename(f"{norm.name}_{node.name}")
    before.name = norm.name
    erase_dead(module, *statistics)
