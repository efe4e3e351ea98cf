"""Convolutions with weights packed for oneDNN, which do the activation or the sum that follows as they write.

At every call torch's own convolution packs its weights anew, and for one image on one thread it often multiplies
matrices instead: with one image resnet50 takes a third longer so, or twice as long. The operations used here are those
that torch.compile freezes convolutions into (torch/_inductor/fx_passes/mkldnn_fusion.py; "post-ops" in oneDNN's words).
They are not public: where one is missing nothing is packed.
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

from fxcore.transforms.base import hooked

_OPERATIONS = ("_reorder_convolution_weight", "_convolution_pointwise", "_get_mkldnn_serialized_md", "_nbytes")
_SHAPES = 64
"""Input shapes for which a convolution looks up the format that is best."""


class Activation(NamedTuple):
    """oneDNN's numbers for an activation, and torch's function."""

    numbers: list[float]
    function: Callable[[Tensor], Tensor]


ACTIVATIONS = {
    "none": Activation([], lambda x: x),
    "relu": Activation([], F.relu),
    "hardtanh": Activation([0.0, 6.0], F.relu6),
    "hardswish": Activation([], F.hardswish),
    "swish": Activation([], F.silu),
}
_NAMES: dict[Any, str] = {
    nn.ReLU: "relu",
    F.relu: "relu",
    torch.relu: "relu",
    nn.ReLU6: "hardtanh",
    nn.Hardswish: "hardswish",
    nn.SiLU: "swish",
}


def can_be_packed(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether :class:`PackedConv2d` can do it: a float32 convolution without hooks on x86, where it was seen to be
    faster."""
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


class _Ready(NamedTuple):
    """A packed weight, and the shape of what comes out."""

    weight: Tensor
    shape: torch.Size


class PackedConv2d(nn.Module):
    """``activation(conv(x))`` or ``activation(conv(x) + other)``.

    It holds the weight in the formats that oneDNN asks for and, once it has run, in no other. Few convolutions have
    more than one, by the input's shape and the number of threads: all that resnet50 gets for batches of 1 to 32 are
    7 % larger than its weights.

    Args:
        conv: one that :func:`can_be_packed`; its bias is shared.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        assert not isinstance(conv.padding, str)
        self.bias = conv.bias
        self._size = conv.weight.shape
        self._geometry = (conv.padding, conv.stride, conv.dilation, conv.groups)
        self._plain: Tensor | None = conv.weight.detach()
        self._bytes = {self._plain.untyped_storage().data_ptr(): self._plain.untyped_storage().nbytes()}
        self._formats: dict[bytes, Tensor] = {}
        self._seen: dict[tuple[torch.Size, int], _Ready] = {}
        self._guard = threading.Lock()

    def forward(
        self, x: Tensor, other: Tensor | None = None, activation: str = "none", overwrite: bool = False
    ) -> Tensor:
        """Of ``x`` ``[batch, channels, height, width]``; with ``overwrite`` the result takes ``other``'s memory."""
        ready = self._ready(x)
        if ready is None or (other is not None and not _alike(other, x.dtype, ready.shape)):
            return self._in_steps(x, other, activation)
        convolution = (ready.weight, self.bias, *self._geometry)
        numbers = ACTIVATIONS[activation].numbers
        made: Tensor
        if other is None:
            made = torch.ops.mkldnn._convolution_pointwise(x, *convolution, activation, numbers, "")
        else:
            after = ("add", 1.0, None if activation == "none" else activation, numbers, "")
            if overwrite:
                made = torch.ops.mkldnn._convolution_pointwise_(other, x, *convolution, *after)
            else:
                made = torch.ops.mkldnn._convolution_pointwise(x, other, *convolution, *after)
        return made

    def storages(self) -> dict[int, int]:
        """Bytes of the weight in memory, by address."""
        return self._bytes

    def _in_steps(self, x: Tensor, other: Tensor | None, activation: str) -> Tensor:
        """By torch's own operations, which take what oneDNN's do not, and say what is wrong with ``x``."""
        padding, stride, dilation, groups = self._geometry
        made = F.conv2d(x, self._dense(), self.bias, stride, padding, dilation, groups)
        return ACTIVATIONS[activation].function(made if other is None else made + other)

    def _ready(self, x: Tensor) -> _Ready | None:
        """What it takes for inputs like ``x``, on as many threads as the calling thread may use; None if oneDNN's
        operation cannot do them."""
        key = (x.shape, torch.get_num_threads())
        ready = self._seen.get(key)
        if ready is None:
            shape = self._output_shape(x.shape)
            if shape is None:
                return None
            with self._guard:  # extractors over one model share it
                if len(self._seen) < _SHAPES:
                    ready = self._seen[key] = _Ready(self._pack(x.shape), shape)
                else:  # each format is right, if not the fastest
                    near = min(self._seen, key=lambda seen: abs(seen[0].numel() - x.numel()))
                    ready = _Ready(self._seen[near].weight, shape)
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
        self._bytes = {id(packed): torch.ops.mkldnn._nbytes(packed) for packed in self._formats.values()}
        return made

    def _dense(self) -> Tensor:
        """The weight as torch's own convolution takes it."""
        plain = self._plain
        dense = next(iter(self._formats.values())).to_dense() if plain is None else plain
        return dense.contiguous(memory_format=torch.channels_last)


def _alike(other: object, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether it can be added without being broadcast or converted."""
    return isinstance(other, Tensor) and other.dtype == dtype and other.shape == shape


def fuse_what_follows(module: fx.GraphModule) -> None:
    """Let each packed convolution of ``module``, which is out-of-place, do the activation or the sum that follows it.

    Only where nothing else reads what is between, so never where that is an output.
    """
    for node in list(module.graph.nodes):
        if (activation := _activation(module, node)) is not None:
            conv = node.args[0]
            if _is_free(module, conv) and (len(conv.args) == 1 or activation == "relu"):
                _merge(node, conv, conv.args, activation)
        elif node.op == "call_function" and node.target in (operator.add, torch.add) and not node.kwargs:
            convs = [arg for arg in node.args if _is_free(module, arg) and len(arg.args) == 1]
            if convs and len(node.all_input_nodes) == len(node.args) == 2:
                others = [arg for arg in node.args if arg is not convs[-1]]
                _merge(node, convs[-1], (convs[-1].args[0], *others), "none")
    module.recompile()


def _activation(module: fx.GraphModule, node: fx.Node) -> str | None:
    """oneDNN's name for the activation that the node is, if it is one."""
    if len(node.args) != 1 or node.kwargs.keys() - {"inplace"}:
        return None
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return None if hooked(called) else _NAMES.get(type(called))
    return _NAMES.get(node.target) if node.op == "call_function" else None


def _is_free(module: fx.GraphModule, argument: object) -> bool:
    """Whether it is a packed convolution that has no activation yet and that one node alone reads."""
    return (
        isinstance(argument, fx.Node)
        and argument.op == "call_module"
        and isinstance(module.get_submodule(str(argument.target)), PackedConv2d)
        and len(argument.users) == 1
        and not argument.kwargs
    )


def _merge(node: fx.Node, conv: fx.Node, args: tuple[Any, ...], activation: str) -> None:
    """One call of ``conv``'s module in the place of ``node``, and with its name, for both."""
    kwargs: dict[str, Any] = {"activation": activation} if activation != "none" else {}
    with node.graph.inserting_before(node):
        made = node.graph.create_node("call_module", conv.target, args, kwargs, name=node.name)
    made.meta = node.meta
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    node.graph.erase_node(conv)
