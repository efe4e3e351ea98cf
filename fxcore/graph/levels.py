"""C1…C5 and P2…: names for the feature map at stride 2, 4, 8, 16, 32.

The rule, for C levels. Only nodes through which every path from the input runs count (dominators of the output), so a
tensor inside a residual branch is never a level. Of those at one stride, a node counts by the module that ends with
it: the outermost such module, modules with children before leaves; the last of the outermost ones is the level. So C4
of ResNet is the end of ``layer3`` and not the widened tensor inside ``layer4.0``, and C5 of Swin is the end of
``features`` and not the norm after it. How far out a module lies is counted without the trunk: containers such as
``features`` that run through three strides or more.

A widening 1x1 convolution (with its norm and activation) that closes the network belongs to the classifier's head and
is left out, as timm's ``feature_info`` does; the one family where timm keeps it is listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn
from torchvision import ops

from fxcore.layer_types import BATCH_NORMS
from fxcore.models.entry import FeatureMap
from fxcore.tracing.names import MODULE, PATH

_C_STRIDES = (2, 4, 8, 16, 32)
_DEEPEST = 7  # P7, the coarsest level of RetinaNet's pyramid

# timm ends these at the last 1x1 convolution, whose width belongs to the published architecture's stages.
_HEAD_CONVOLUTION_KEPT = "mobilenet_v3"

_PASS_THROUGH = (*BATCH_NORMS, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Level:
    """A feature map: the node that makes it, its channels, and its stride in input pixels.

    >>> from fxcore import model_graph
    >>> model_graph("resnet18").levels["C5"]
    Level(node='layer4.1.relu_1', channels=512, stride=32)
    """

    node: str
    channels: int
    stride: int


def stride_of(node: fx.Node, size: tuple[int, int]) -> int | None:
    """Input pixels per position of the node's feature map, rounded to a power of two; None if it is no feature map.

    Args:
        size: height and width of the input.
    """
    value, axes = node.meta.get("value"), node.meta.get("axes")
    if not isinstance(value, Tensor) or not axes or "H" not in axes or "W" not in axes or value.ndim != len(axes):
        return None
    height, width = value.shape[axes.index("H")], value.shape[axes.index("W")]
    if height < 2 and width < 2:
        return None  # pooled away
    if not height or not width:
        return None
    vertical, horizontal = (
        round(math.log2(max(1.0, full / part))) for full, part in zip(size, (height, width), strict=True)
    )
    return int(2**vertical) if vertical == horizontal else None


def channels_of(node: fx.Node) -> int | None:
    """Size of the channel axis; None where it is not known."""
    value, axes = node.meta.get("value"), node.meta.get("axes")
    if isinstance(value, Tensor) and axes and "C" in axes and value.ndim == len(axes):
        return int(value.shape[axes.index("C")])
    return None


def find_levels(
    name: str, graph: fx.Graph, root: nn.Module, size: tuple[int, int], maps: Sequence[FeatureMap] = ()
) -> dict[str, Level]:
    """Return the levels of an annotated graph.

    Args:
        name: the model's name, for the families that are listed.
        graph: annotated by :func:`fxcore.graph.annotate.annotate`.
        root: the module that the graph was traced from.
        size: height and width of the input that it was annotated for.
        maps: the feature maps that the model declares; if there are any, they are the levels.

    Returns:
        Levels in the order C1…C5, P2…; empty where the model has a single resolution (ViT) or none.
    """
    if maps:
        return _declared(graph, maps)
    last = _backbone_end(graph)
    trunk = _dominators(graph, last) if last is not None else []
    ends = _module_ends(graph)
    by_stride: dict[int, list[fx.Node]] = {}
    for node in trunk:
        stride = stride_of(node, size)
        if stride is not None and node.meta.get("rows") == 1 and node.op != "placeholder":
            by_stride.setdefault(stride, []).append(node)
    trunks = _trunks(by_stride)
    chosen: dict[int, fx.Node] = {}
    for stride, nodes in by_stride.items():
        if stride in _C_STRIDES:
            if stride == max(by_stride) and _HEAD_CONVOLUTION_KEPT not in name:
                nodes = _without_head(nodes, root)
            picked = _outermost_end(nodes, ends, trunks)
            if picked is not None:
                chosen[stride] = picked
    levels = {f"C{int(math.log2(s))}": _level(chosen[s], s) for s in sorted(chosen)}
    if len(levels) < 2:
        levels = {}
    return levels | _pyramid(graph, size)


def _declared(graph: fx.Graph, maps: Sequence[FeatureMap]) -> dict[str, Level]:
    """Return the levels that the model declares: of each module, the last node that makes as many channels."""
    found: dict[str, Level] = {}
    for declared in maps:
        inside = [n for n in graph.nodes if _inside(n.meta.get(PATH, ""), declared.module) and n.meta.get("rows") == 1]
        node = next((n for n in reversed(inside) if channels_of(n) in (declared.channels, None)), None)
        if node is not None and declared.stride in _C_STRIDES:
            found[f"C{int(math.log2(declared.stride))}"] = Level(node.meta[PATH], declared.channels, declared.stride)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def _level(node: fx.Node, stride: int) -> Level:
    return Level(node.meta[PATH], channels_of(node) or 0, stride)


def _backbone_end(graph: fx.Graph) -> fx.Node | None:
    """Return the last tensor of the module ``backbone`` where the model has one, else of the graph."""
    tensors: list[fx.Node] = [n for n in graph.nodes if n.op != "output" and isinstance(n.meta.get("value"), Tensor)]
    for part in ("backbone.body", "backbone"):
        inside = [n for n in tensors if _inside(n.meta.get(PATH, ""), part)]
        if inside:
            return inside[-1]
    return tensors[-1] if tensors else None


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")


def _dominators(graph: fx.Graph, sink: fx.Node) -> list[fx.Node]:
    """Return nodes that lie on every path from the inputs to ``sink``, in order. Only edges that carry tensors
    count."""
    above: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            above[node] = frozenset([node])
        elif node.meta.get("carries"):
            reached = [above[n] for n in node.all_input_nodes if n in above]
            if reached:
                above[node] = frozenset.intersection(*reached) | {node}
        if node is sink:
            break
    common = above.get(sink, frozenset())
    return [node for node in graph.nodes if node in common]


def _module_ends(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """For each node, the paths of the modules of which it is the last node."""
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("output", "placeholder") or not node.meta.get("carries"):
            continue
        for path in _outer_modules(node.meta.get(MODULE, "")):
            last[path] = node
    ends: dict[fx.Node, list[str]] = {}
    for path, node in last.items():
        ends.setdefault(node, []).append(path)
    return ends


def _trunks(by_stride: dict[int, list[fx.Node]]) -> set[str]:
    """Paths of the modules in which the feature map has three strides or more."""
    strides: dict[str, set[int]] = {}
    for stride, nodes in by_stride.items():
        for node in nodes:
            for outer in _outer_modules(node.meta.get(MODULE, "")):
                strides.setdefault(outer, set()).add(stride)
    return {path for path, passed in strides.items() if len(passed) >= 3}


def _outer_modules(path: str) -> list[str]:
    """``a.b.c`` → ``a``, ``a.b``, ``a.b.c``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _outermost_end(nodes: list[fx.Node], ends: dict[fx.Node, list[str]], trunks: set[str]) -> fx.Node | None:
    """Return the last of ``nodes`` that end an outermost module; modules with children come before leaves."""

    def rank(node: fx.Node, path: str) -> tuple[bool, int]:
        leaf = node.op == "call_module" and path == node.target
        return leaf, sum(outer not in trunks for outer in _outer_modules(path))

    ranked = [(min(rank(n, p) for p in ends[n]), n) for n in nodes if n in ends]
    if not ranked:
        return None
    best = min(r for r, _ in ranked)
    return [n for r, n in ranked if r == best][-1]


def _without_head(nodes: list[fx.Node], root: nn.Module) -> list[fx.Node]:
    """Drop a closing widening 1x1 convolution and what follows it."""
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, _PASS_THROUGH):
            continue
        convolution = module
        if isinstance(module, ops.Conv2dNormActivation):
            convolution = next((m for m in module if isinstance(m, nn.Conv2d)), None)
        widens = (
            isinstance(convolution, nn.Conv2d)
            and set(convolution.kernel_size) == {1}
            and convolution.out_channels > convolution.in_channels
        )
        return _without_head(nodes[:index], root) if widens and index > 0 else nodes
    return nodes


def _pyramid(graph: fx.Graph, size: tuple[int, int]) -> dict[str, Level]:
    """P levels: the outputs of a feature pyramid's output layers and extra blocks."""
    found: dict[str, Level] = {}
    for node in graph.nodes:
        path = node.meta.get(PATH, "")
        if ".fpn.layer_blocks." not in path and ".fpn.extra_blocks." not in path:
            continue
        stride = stride_of(node, size)
        makes_map = node.op == "call_module" or path.endswith(".max_pool2d")
        if makes_map and stride is not None and 2 <= math.log2(stride) <= _DEEPEST:
            found[f"P{int(math.log2(stride))}"] = _level(node, stride)
    return dict(sorted(found.items()))
