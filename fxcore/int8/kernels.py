"""Limits of torch's int8 kernels: the ranges that they need, and the layers that they compute incorrectly.

The rules were found by comparing the kernels of torch 2.15 with float values, on CPUs with and without VNNI.
``torch.backends.quantized.engine`` determines which kernels run: ``x86`` uses oneDNN if the CPU has VNNI, and FBGEMM
otherwise and for more than 100 groups.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.int8.calls import CONVOLUTION_FUNCTIONS
from fxcore.layer_types import ALL_CONVOLUTIONS, BATCH_NORMS, INSTANCE_NORMS, TRANSPOSED_CONVOLUTIONS
from fxcore.tracing.graph_module import attribute
from fxcore.tracing.writes import is_number

TRANSPOSED = (
    *TRANSPOSED_CONVOLUTIONS,
    *(nn.functional.conv_transpose1d, nn.functional.conv_transpose2d, nn.functional.conv_transpose3d),
)
"""Transposed convolutions. oneDNN's results are wrong if the numbers of input and output channels differ, FBGEMM's for
kernels with two rows; and torch packs the arguments of the functions in the wrong order."""

_PRELU = (nn.PReLU, nn.functional.prelu, torch.prelu, "prelu")
"""PReLU. torch's int8 kernel applies the slope to positive values, too."""

_SCALAR_SUMS = (operator.add, operator.iadd, torch.add)
_SCALAR_PRODUCTS = (operator.mul, operator.imul, torch.mul)

_MAX_GROUPS = 100
"""Maximum number of groups for which ``x86`` uses oneDNN (should_use_onednn_quant in torch)."""


def ranges(module: fx.GraphModule) -> str:
    """Return the engine whose default ranges of activations ``module`` needs.

    Without VNNI, x86 kernels add two products in 16 bits, so their default ranges use seven of eight bits to avoid
    overflow. oneDNN's ranges use all eight bits, which is safe if its VNNI kernels compute all of ``module``; FBGEMM's
    depthwise kernels never use VNNI.
    """
    engine = torch.backends.quantized.engine
    if engine not in ("x86", "onednn"):
        return engine
    by_fbgemm = any(_is_fbgemms(_groups(module, node)) for node in module.graph.nodes)
    return "onednn" if _has_vnni() and not by_fbgemm else "x86"


def miscomputed(module: fx.GraphModule, of_known_range: Collection[Any]) -> set[fx.Node]:
    """Return the nodes that this CPU's kernels compute incorrectly or not at all, or whose values make the next kernel
    overflow.

    Args:
        module: the module to quantize.
        of_known_range: classes, functions and methods whose values use all eight bits regardless of :func:`ranges`,
            such as sigmoids.
    """
    overflowing = of_known_range if ranges(module) in ("x86", "fbgemm") else ()
    return {
        node
        for node in module.graph.nodes
        if kind_of(module, node) in (*TRANSPOSED, *_PRELU)
        or _is_packed_wrongly(module, node)
        or _lacks_kernel(module, node)
        or _loses_an_argument(module, node)
        or _takes_range(node)
        or _joins_numbers(node)
        or (kind_of(module, node) in overflowing and _is_weighted(module, node))
    }


def kind_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the class of the module that a node calls; for other nodes, the target."""
    return type(module.get_submodule(str(node.target))) if node.op == "call_module" else node.target


def _is_fbgemms(groups: int) -> bool:
    """Return whether FBGEMM, not oneDNN, computes a convolution with ``groups``."""
    engine = torch.backends.quantized.engine
    return engine == "fbgemm" or (engine == "x86" and (groups > _MAX_GROUPS or not _has_vnni()))


def _has_vnni() -> bool:
    """Return whether the CPU has AVX-512 VNNI, which torch requires; False if torch is too old to tell."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_f") and capabilities.get("avx512_vnni"))


def _is_packed_wrongly(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether FBGEMM would write past the end of a convolution's packed weights.

    With AVX-512 it packs groups of two or four channels eight or four at a time, and allocates too little memory for an
    incomplete last pack.
    """
    groups = _groups(module, node)
    if groups == 1 or not _is_fbgemms(groups):
        return False
    if node.op == "call_module":
        weight: Any = module.get_submodule(str(node.target)).weight
    else:
        weight = _attribute(module, node.args[1])
    return weight is None or (weight.shape[1] in (2, 4) and groups % (16 // weight.shape[1]) != 0)


def _lacks_kernel(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether torch cannot pack a layer.

    It cannot if the weights are computed, if the layer is padded by name, replication or wrapping, or if it is a batch
    norm without running statistics or weights.
    """
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        if isinstance(layer, BATCH_NORMS):
            return layer.running_mean is None or layer.weight is None
        return isinstance(layer, ALL_CONVOLUTIONS) and (
            isinstance(layer.padding, str) or layer.padding_mode not in ("zeros", "reflect")
        )
    if node.target is nn.functional.linear:
        return _attribute(module, node.args[1] if len(node.args) > 1 else node.kwargs["weight"]) is None
    return node.target in CONVOLUTION_FUNCTIONS and (
        _attribute(module, node.args[1]) is None or isinstance(node.args[4], str)
    )


def _loses_an_argument(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the kernel of ``node`` ignores an argument: ``alpha`` of sums, or instance norm's statistics."""
    if node.target is nn.functional.instance_norm:
        return len(node.args) > 1 or not {"running_mean", "use_input_stats"}.isdisjoint(node.kwargs)
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return isinstance(layer, INSTANCE_NORMS) and layer.running_mean is not None
    return node.target is torch.add and bool(node.kwargs.get("alpha", 1) != 1)


def _takes_range(node: fx.Node) -> bool:
    """Return whether ``node`` adds a number, or multiplies by more than 1.

    torch gives the value before it the range of the value after it, in which few integers are left for it.
    """
    if len(node.all_input_nodes) != 1 or len(node.args) < 2:
        return False
    number = next((one for one in node.args[:2] if not isinstance(one, fx.Node)), None)
    if node.target in _SCALAR_SUMS:
        return number is not None
    return node.target in _SCALAR_PRODUCTS and isinstance(number, (int, float)) and abs(number) > 1


def _joins_numbers(node: fx.Node) -> bool:
    """Return whether ``node`` joins a tensor with one that is made from numbers, as by ``torch.linspace(-1, 1, 9)``.

    torch takes the first argument of such a call for a tensor, whose range it shares with the others.
    """
    joined = node.args[0] if node.args and isinstance(node.args[0], (list, tuple)) else ()
    return any(isinstance(value, fx.Node) and _is_made(value) for value in joined[1:])


def _is_made(node: fx.Node) -> bool:
    """Return whether ``node`` is made from numbers, the first of them its first argument, or is a view of such."""
    while node.args and isinstance(first := node.args[0], fx.Node):
        node = first
    return bool(node.args) and isinstance(node.args[0], (int, float)) and all(map(is_number, node.all_input_nodes))


def _is_weighted(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a convolution or linear layer reads ``node``, directly or through pooling or reshaping."""
    for user in node.users:
        reader = kind_of(module, user)
        if reader in (*CONVOLUTION_FUNCTIONS, nn.functional.linear):
            return True
        if isinstance(reader, type) and issubclass(reader, (*ALL_CONVOLUTIONS, nn.Linear)):
            return True
        if len(user.all_input_nodes) == 1 and _is_weighted(module, user):
            return True
    return False


def _groups(module: fx.GraphModule, node: fx.Node) -> int:
    """Return the number of groups of the convolution that ``node`` calls; 1 for other nodes."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return int(called.groups) if isinstance(called, ALL_CONVOLUTIONS) else 1
    groups: Any = node.args[6] if node.target in CONVOLUTION_FUNCTIONS else 1
    return int(groups)


def _attribute(module: fx.GraphModule, node: Any) -> Tensor | None:
    """Return the tensor of the module that ``node`` reads; None if the value is computed."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = attribute(module, str(node.target))
    return found if isinstance(found, Tensor) else None
