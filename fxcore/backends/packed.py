"""Convolutions with weights prepacked for oneDNN and a fused activation or sum (oneDNN's post-ops).

torch's own convolution packs its weights at every call, and for one image on one thread often uses a slower matrix
multiplication. This module uses the operations that torch.compile freezes convolutions into
(torch/_inductor/fx_passes/mkldnn_fusion.py). They are private: if one is missing, nothing is packed.
"""

from __future__ import annotations

import operator
import platform
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore.passes.base import hooked

_OPERATIONS = ("_reorder_convolution_weight", "_convolution_pointwise", "_get_mkldnn_serialized_md", "_nbytes")
_SUM: tuple[Any, ...] = ("add", 1.0, None, [], "")
_SHAPES = 64
"""Maximum number of input shapes for which a convolution keeps the best weight format."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "hardswish": F.hardswish,
    "swish": F.silu,
}
"""oneDNN's activations, as torch's functions. ReLU and ReLU6 are not among them: oneDNN's versions turn NaN into 0."""

_NAMES: dict[Any, str] = {nn.Hardswish: "hardswish", nn.SiLU: "swish"}


def can_be_packed(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether :class:`PackedConv2d` can replace ``module``: a float32 convolution without hooks, on x86."""
    return (
        type(module) is nn.Conv2d
        and not hooked(module)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and platform.machine() in ("x86_64", "AMD64")
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATIONS)
    )


class _Prepared(NamedTuple):
    """The packed weight for an input shape, and the output shape."""

    weight: Tensor
    shape: torch.Size


class PackedConv2d(nn.Module):
    """``activation(conv(x))`` or ``conv(x) + other``.

    Once it has run, it holds the weight only in the formats that oneDNN chose for the input shapes and thread counts
    seen so far. Few convolutions need more than one format for images of one size.

    Args:
        conv: a convolution that :func:`can_be_packed`; its bias is shared.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        assert not isinstance(conv.padding, str)
        self.bias = conv.bias
        self._size = conv.weight.shape
        self._geometry = (conv.padding, conv.stride, conv.dilation, conv.groups)
        self._plain: Tensor | None = conv.weight.detach()
        self._bytes = self._plain.untyped_storage().nbytes()
        self._formats: dict[bytes, Tensor] = {}
        self._seen: dict[tuple[torch.Size, int], _Prepared] = {}
        self._guard = threading.Lock()

    def forward(
        self, x: Tensor, other: Tensor | None = None, activation: str = "none", overwrite: bool = False
    ) -> Tensor:
        """Convolve ``x`` ``[N, C, H, W]``.

        Args:
            other: added to the result; without an ``activation``.
            activation: a key of :data:`ACTIVATIONS`.
            overwrite: write the result into the memory of ``other``.
        """
        ready = self._prepare(x)
        if ready is None or (other is not None and not _is_alike(other, x.dtype, ready.shape)):
            return self._unfused(x, other, activation)
        convolution = (ready.weight, self.bias, *self._geometry)
        made: Tensor
        if other is None:
            made = torch.ops.mkldnn._convolution_pointwise(x, *convolution, activation, [], "")
        elif overwrite:
            made = torch.ops.mkldnn._convolution_pointwise_(other, x, *convolution, *_SUM)
        else:
            made = torch.ops.mkldnn._convolution_pointwise(x, other, *convolution, *_SUM)
        return made

    def storages(self) -> dict[int, int]:
        """Map the address of the weight to its size in bytes.

        The packed weight has the same size apart from padding; a few weights need a second format.
        """
        return {id(self): self._bytes}

    def _unfused(self, x: Tensor, other: Tensor | None, activation: str) -> Tensor:
        """Compute the same with torch's public operations, for inputs that oneDNN does not support, and for their error
        messages."""
        padding, stride, dilation, groups = self._geometry
        made = F.conv2d(x, self._dense(), self.bias, stride, padding, dilation, groups)
        return ACTIVATIONS[activation](made if other is None else made + other)

    def _prepare(self, x: Tensor) -> _Prepared | None:
        """Pack the weight for inputs like ``x`` and the current number of threads; None if oneDNN does not support
        ``x``."""
        key = (x.shape, torch.get_num_threads())
        ready = self._seen.get(key)
        if ready is None:
            shape = self._output_shape(x.shape)
            if shape is None:
                return None
            with self._guard:  # extractors over one model share it
                if len(self._seen) < _SHAPES:
                    ready = self._seen[key] = _Prepared(self._pack(x.shape), shape)
                else:  # any format is correct, but may be slower
                    near = min(self._seen, key=lambda seen: abs(seen[0].numel() - x.numel()))
                    ready = _Prepared(self._seen[near].weight, shape)
        return ready if x.dtype == torch.float32 else None

    def _output_shape(self, shape: torch.Size) -> torch.Size | None:
        if len(shape) != 4 or shape.numel() == 0 or shape[1] != self._size[1] * self._geometry[3]:
            return None
        sides = zip(shape[2:], self._size[2:], *self._geometry[:3], strict=True)
        made = [(side + 2 * pad - far * (kernel - 1) - 1) // step + 1 for side, kernel, pad, step, far in sides]
        return torch.Size([shape[0], self._size[0], *made]) if min(made) > 0 else None

    def _pack(self, shape: torch.Size) -> Tensor:
        made: Tensor = torch.ops.mkldnn._reorder_convolution_weight(self._dense(), *self._geometry, shape)
        described = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(made).tolist())
        made = self._formats.setdefault(described, made)
        self._plain = None
        return made

    def _dense(self) -> Tensor:
        """Return the weight for torch's own convolution."""
        plain = self._plain
        dense = next(iter(self._formats.values())).to_dense() if plain is None else plain
        return dense.contiguous(memory_format=torch.channels_last)


def _is_alike(other: object, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Return whether ``other`` is a tensor of this dtype and shape, so that adding it needs no broadcasting or
    conversion."""
    return isinstance(other, Tensor) and other.dtype == dtype and other.shape == shape


def fuse_post_ops(module: fx.GraphModule) -> None:
    """Fuse each packed convolution of an out-of-place ``module`` with the activation or sum that follows it.

    A convolution is fused only if its value has no other readers and is not an output. Only the graph changes, not
    the code.
    """
    for node in list(module.graph.nodes):
        if (activation := _activation(module, node)) is not None:
            conv = node.args[0]
            if _is_free(module, conv) and len(conv.args) == 1:
                _merge(node, conv, conv.args, activation)
        elif node.op == "call_function" and node.target in (operator.add, torch.add) and not node.kwargs:
            convs = [arg for arg in node.args if _is_free(module, arg) and len(arg.args) == 1]
            if convs and len(node.all_input_nodes) == len(node.args) == 2:
                others = [arg for arg in node.args if arg is not convs[-1]]
                _merge(node, convs[-1], (convs[-1].args[0], *others), "none")


def _activation(module: fx.GraphModule, node: fx.Node) -> str | None:
    """Return oneDNN's name for the activation that the node applies; None if it is not an activation."""
    if len(node.args) != 1 or node.kwargs.keys() - {"inplace"}:
        return None
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return None if hooked(called) else _NAMES.get(type(called))
    return _NAMES.get(node.target) if node.op == "call_function" else None


def _is_free(module: fx.GraphModule, argument: object) -> bool:
    """Return whether ``argument`` is a packed convolution with a single reader and nothing fused to it yet."""
    return (
        isinstance(argument, fx.Node)
        and argument.op == "call_module"
        and isinstance(module.get_submodule(str(argument.target)), PackedConv2d)
        and len(argument.users) == 1
        and not argument.kwargs
    )


def _merge(node: fx.Node, conv: fx.Node, args: tuple[Any, ...], activation: str) -> None:
    """Replace ``conv`` and ``node`` by one call of ``conv``'s module with the name of ``node``."""
    kwargs: dict[str, Any] = {"activation": activation} if activation != "none" else {}
    with node.graph.inserting_before(node):
        made = node.graph.create_node("call_module", conv.target, args, kwargs, name=node.name)
    made.meta = node.meta
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    node.graph.erase_node(conv)
