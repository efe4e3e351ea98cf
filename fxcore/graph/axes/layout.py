"""The layout of an activation: NCHW, NHWC, tokens, …

Axes are propagated through the graph as letters: N batch, T time, C channels, H and W space, L a sequence of positions.
An operation that permutes axes permutes the letters; one that keeps the rank keeps them; one that merges space into a
sequence yields L. Where none of this applies (attention heads, windows), the layout is unknown until the next operation
with a fixed output layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchvision import ops

from fxcore.graph.attention_weights import is_returned_attention
from fxcore.graph.axes.moved_axes import loses_channels, moved, moves_axes
from fxcore.graph.operations import KEEPS, PRODUCTS, RESHAPES
from fxcore.layer_types import ALL_CONVOLUTIONS, BATCH_NORMS, INSTANCE_NORMS, POOLS
from fxcore.tracing.names import operation_name

TOKENS = "tokens"

# Modules that require channels in dimension 1.
CHANNELS_FIRST = (
    *(*ALL_CONVOLUTIONS, *POOLS, *BATCH_NORMS, *INSTANCE_NORMS),
    nn.GroupNorm,
    ops.Conv2dNormActivation,
    ops.Conv3dNormActivation,
    ops.SqueezeExcitation,
)
# Those of them that also accept [N, C].
_ALSO_NC = (*BATCH_NORMS, nn.GroupNorm)
_CHANNELS_FIRST_AXES = {3: "NCL", 4: "NCHW", 5: "NCTHW"}
FUNCTIONS_CHANNELS_FIRST = {"conv2d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "interpolate"}
# Operations that remove an axis.
_REDUCES = {
    *("mean", "sum", "amax", "amin", "prod", "norm", "std", "var", "logsumexp", "argmax", "argmin", "all", "any"),
    *("squeeze", "getitem", "select"),
}
# Maximum number of nodes between a window partition and its reverse: MaxViT's attention has the most.
_WINDOW_NODES = 40


def layout_name(axes: str | None) -> str | None:
    """Return the public name of a layout: its letters, or ``tokens`` for ``[N, L, C]``."""
    return TOKENS if axes == "NLC" else axes


def follow(node: fx.Node, value: Any, module: nn.Module | None) -> str | None:
    """Return the axes of ``node``'s value, given those of its inputs under ``node.meta["axes"]``.

    Args:
        node: a node whose inputs have been visited.
        value: its value (a tensor on any device, or another object).
        module: the module that a ``call_module`` node calls.
    """
    inputs = [n for n in node.all_input_nodes if n.meta.get("axes")]
    if not isinstance(value, Tensor):
        return inputs[0].meta["axes"] if inputs else None  # elements of a tuple have its axes
    if node.op == "placeholder":
        return {4: "NCHW", 5: "NCTHW"}.get(value.ndim)
    if node.meta.get("patches"):
        return "NLC"
    name = operation_name(node)
    if isinstance(module, CHANNELS_FIRST) or name in FUNCTIONS_CHANNELS_FIRST:
        if not inputs and _are_products(node, value):
            return None  # a convolution that mixes the heads of attention weights
        return "NC" if value.ndim == 2 and isinstance(module, _ALSO_NC) else _channels_first(inputs, value.ndim)
    if inputs and module is None and moves_axes(node, name):
        return moved(node, name, value)
    if is_returned_attention(node):
        return None
    if inputs and name in _REDUCES and loses_channels(node, name, value):
        return None
    if value.ndim == 2:
        mixed = isinstance(module, nn.Linear) or name == "linear"
        return (None if mixed else _of_equal_input(inputs, value)) or ("NC" if inputs else None)
    if not inputs:
        return _restored(node, value)
    axes, before = inputs[0].meta["axes"], inputs[0].meta.get("value")
    if isinstance(module, ops.Permute):
        return "".join(axes[d] for d in module.dims) if len(module.dims) == len(axes) else None
    return (
        _of_equal_input(inputs, value)
        or (_with_kept_rank(axes, before, value, name) if _may_keep_axes(node, inputs, value, name, module) else None)
        or _with_merged_space(axes, before, value)
        or _with_split_positions(axes, before, value, node)
        or _restored(node, value)
    )


def _channels_first(inputs: list[fx.Node], ndim: int) -> str | None:
    """Return the axes of a result with channels in dimension 1; the others keep their order, e.g. if width is first."""
    usual = _CHANNELS_FIRST_AXES.get(ndim)
    given = str(inputs[0].meta["axes"]) if inputs else ""
    return given if given.startswith("NC") and sorted(given) == sorted(usual or "") else usual


def _are_products(node: fx.Node, value: Tensor) -> bool:
    """Return whether ``node`` reads products of matrices as they are: of queries and keys, not of positions."""
    while (read := node.all_input_nodes) and isinstance(read[0].meta.get("value"), Tensor):
        node = read[0]
        if node.meta["value"].shape[2:] != value.shape[2:]:
            return False
        if operation_name(node) in PRODUCTS:
            return True
    return False


def _of_equal_input(inputs: list[fx.Node], value: Tensor) -> str | None:
    """Return the axes of the first input of the same shape."""
    for node in inputs:
        before = node.meta.get("value")
        if isinstance(before, Tensor) and before.shape == value.shape:
            return str(node.meta["axes"])
    return None


def _may_keep_axes(node: fx.Node, inputs: list[fx.Node], value: Tensor, name: str, module: nn.Module | None) -> bool:
    """Return whether an operation that changes sizes is known, or seems, not to move the axes of ``inputs``.

    Of models' own leaf modules and functions, those that do not give an axis the size that another one had seem so.
    """
    origin = str(type(module).__module__ if module is not None else getattr(node.target, "__module__", None))
    if name in KEEPS or name in RESHAPES or (module is not None and origin.startswith(("torch.nn.", "torch.ao."))):
        return True
    if node.op == "call_method" or origin.partition(".")[0] in ("torch", "_operator", "builtins", "None"):
        return False
    return not any(_seems_permuted(n.meta.get("value"), value) for n in inputs)


def _seems_permuted(before: Any, value: Tensor) -> bool:
    if not isinstance(before, Tensor) or before.ndim != value.ndim:
        return False
    return any(old != new and new in before.shape[1:] for old, new in zip(before.shape, value.shape, strict=True))


def _with_kept_rank(axes: str, before: Any, value: Tensor, name: str) -> str | None:
    """Return the axes of an input of the same rank; for reshapes, only if the first two sizes are unchanged."""
    if len(axes) != value.ndim:
        return None
    kept = isinstance(before, Tensor) and before.shape[:2] == value.shape[:2]
    return axes if kept or name not in RESHAPES else None


def _with_merged_space(axes: str, before: Any, value: Tensor) -> str | None:
    """Return the axes of a sequence of positions flattened from a map with ``axes``."""
    if value.ndim != 3 or not isinstance(before, Tensor):
        return None
    if axes in ("NCHW", "NCTHW"):
        return "NCL" if before.shape[1] == value.shape[1] else None
    if axes in ("NHWC", "NTHWC"):
        return "NLC" if (before.shape[1:-1].numel(), before.shape[-1]) == value.shape[1:] else None
    return None


def _with_split_positions(axes: str, before: Any, value: Tensor, node: fx.Node) -> str | None:
    """Return the axes of a map restored from tokens that were a map of the same height and width."""
    if axes != "NLC" or value.ndim != 4 or not isinstance(before, Tensor):
        return None
    if (value.shape[0], value.shape[1:3].numel(), value.shape[3]) != before.shape:
        return None
    return "NHWC" if value.shape[1:3] in _sizes_above(node) else None


def _sizes_above(node: fx.Node) -> set[torch.Size]:
    """Return height and width of the maps among the nearest ancestors, following first inputs."""
    found: set[torch.Size] = set()
    for axes, shape in _above(node):
        if axes == "NCHW":
            found.add(shape[2:])
        elif axes == "NHWC":
            found.add(shape[1:3])
    return found


def _restored(node: fx.Node, value: Tensor) -> str | None:
    """Return the axes of the nearest ancestor of the same shape, or of a map or tokens whose neighbours were merged.

    A reshape back to an earlier shape restores its axes, as in channel shuffles and attention.
    """
    for axes, shape in _above(node):
        if shape == value.shape:
            return axes
        if axes == "NHWC" and _merges_patches(shape, value.shape):
            return "NHWC"
        if axes == "NLC" and _pools_tokens(shape, value.shape):
            return "NLC"
    return None


def _above(node: fx.Node) -> Iterator[tuple[str, torch.Size]]:
    """Yield axes and shape of ancestors with known axes, following first inputs, nearest first.

    Tuples of tensors are followed too, since attention splits queries, keys and values into them.
    """
    for _ in range(_WINDOW_NODES):
        above = next((n for n in node.all_input_nodes if _holds_tensors(n.meta.get("value"))), None)
        if above is None:
            return
        node = above
        axes, value = node.meta.get("axes"), node.meta["value"]
        if axes and isinstance(value, Tensor):
            yield axes, value.shape


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value))


def _pools_tokens(before: torch.Size, after: torch.Size) -> bool:
    """Return whether ``[N, L, C]`` becomes ``[N, L/k**2, m*C]``, as between the stages of Hiera."""
    if len(before) != 3 or len(after) != 3 or before[0] != after[0] or not after[1] or not before[2]:
        return False
    if before[1] % after[1]:
        return False
    return after[1] > 1 and before[1] // after[1] in (4, 16) and after[2] % before[2] == 0


def _merges_patches(before: torch.Size, after: torch.Size) -> bool:
    """Return whether ``[N, H, W, C]`` becomes ``[N, H/k, W/k, k*k*C]``, as between the stages of Swin."""
    if len(before) != 4 or len(after) != 4 or before[0] != after[0] or not after[1] or not after[2]:
        return False
    sides = before[1] // after[1], before[2] // after[2]
    return sides[0] == sides[1] > 1 and after[3] == before[3] * sides[0] ** 2
