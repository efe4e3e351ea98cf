"""What torch's int8 kernels compute rightly: the ranges they need, and the layers that have none to trust.

Each rule comes of comparing the kernels of torch 2.15 with the float values they stand for, on CPUs with and without
VNNI. Which kernels run is up to ``torch.backends.quantized.engine``: ``x86`` takes oneDNN's where the CPU has VNNI, and
FBGEMM's elsewhere and for more than 100 groups.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

TRANSPOSED = (
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.functional.conv_transpose1d, nn.functional.conv_transpose2d, nn.functional.conv_transpose3d),
)
"""oneDNN's are wrong where the channels in and out differ in number, FBGEMM's for kernels of two rows (cosines of 0.3
to 0.6), and of functions torch packs the arguments in another order."""

_CONVOLUTIONS = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)

_MOST_GROUPS = 100
"""Most groups of a convolution that ``x86`` gives to oneDNN (should_use_onednn_quant in torch)."""


def ranges(module: fx.GraphModule) -> str:
    """The engine whose activation ranges ``module`` is to have.

    Without VNNI, x86 kernels add two products in 16 bits, so to avoid overflow their default leaves one of eight bits
    unused. oneDNN's ranges use all eight, where its kernels with VNNI compute all of ``module``; FBGEMM's depthwise
    ones use VNNI nowhere.
    """
    engine = torch.backends.quantized.engine
    if engine not in ("x86", "onednn"):
        return engine
    by_fbgemm = any(_is_fbgemms(_groups(module, node)) for node in module.graph.nodes)
    return "onednn" if _has_vnni() and not by_fbgemm else "x86"


def untrusted(module: fx.GraphModule, of_known_range: Collection[Any]) -> set[fx.Node]:
    """The nodes that no kernel of this CPU computes rightly, or whose values would make the next one overflow.

    Args:
        module: what is going to be int8.
        of_known_range: classes, functions and methods whose values are given all eight bits whatever :func:`ranges`
            says, as sigmoids are.
    """
    overflowing = of_known_range if ranges(module) in ("x86", "fbgemm") else ()
    return {
        node
        for node in module.graph.nodes
        if kind_of(module, node) in TRANSPOSED
        or _is_packed_wrongly(module, node)
        or (kind_of(module, node) in overflowing and _is_weighted(module, node))
    }


def kind_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """The class of the module that a node calls, or the function, the name of the method or attribute."""
    return type(module.get_submodule(str(node.target))) if node.op == "call_module" else node.target


def _is_fbgemms(groups: int) -> bool:
    """Whether FBGEMM, not oneDNN, does a convolution of so many groups."""
    engine = torch.backends.quantized.engine
    return engine == "fbgemm" or (engine == "x86" and (groups > _MOST_GROUPS or not _has_vnni()))


def _has_vnni() -> bool:
    """Whether the CPU has the VNNI of AVX-512, which is what torch asks for."""
    return torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported()


def _is_packed_wrongly(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether FBGEMM would write past the memory of a convolution's weights: it packs groups of two and four channels
    several at a time, eight and four with AVX-512, and leaves no room for the last where they do not come out even."""
    groups = _groups(module, node)
    if groups == 1 or not _is_fbgemms(groups):
        return False
    if node.op == "call_module":
        weight: Any = module.get_submodule(str(node.target)).weight
    else:
        weight = _attribute(module, node.args[1] if len(node.args) > 1 else node.kwargs["weight"])
    return weight is None or (weight.shape[1] in (2, 4) and groups % (16 // weight.shape[1]) != 0)


def _is_weighted(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a convolution or a linear layer reads the value of ``node``, pooled or reshaped perhaps."""
    for user in node.users:
        reader = kind_of(module, user)
        if reader in (*_CONVOLUTIONS, nn.functional.linear):
            return True
        if isinstance(reader, type) and issubclass(reader, (nn.modules.conv._ConvNd, nn.Linear)):
            return True
        if len(user.all_input_nodes) == 1 and _is_weighted(module, user):
            return True
    return False


def _groups(module: fx.GraphModule, node: fx.Node) -> int:
    """The groups of the convolution that a node is; 1 for all else."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return int(called.groups) if isinstance(called, nn.modules.conv._ConvNd) else 1
    if node.target in _CONVOLUTIONS:
        groups: Any = node.kwargs.get("groups", (*node.args[6:], 1)[0])
        return int(groups)
    return 1


def _attribute(module: fx.GraphModule, node: Any) -> Tensor | None:
    """What a node reads of the module; None where it is computed."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    found = getattr(module.get_submodule(owner), name)
    return found if isinstance(found, Tensor) else None
