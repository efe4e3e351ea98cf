"""C1…C5 and P2…: names for the feature map at stride 2, 4, 8, 16, 32.

The rule for C levels: only dominators of the output count, that is, nodes on every path from the input. So a tensor
inside a residual branch is never a level. Among those at one stride, a node is ranked by the outermost module that ends
with it, and modules with children rank before leaves; the level is the last node of the highest rank. So C4 of ResNet
is the end of ``layer3`` and not the widened tensor inside ``layer4.0``, and C5 of Swin is the end of ``features`` and
not the norm after it. The depth of a module is counted without the trunk: containers such as ``features`` that span
three strides or more.

A widening 1x1 convolution (with its norm and activation) at the end of the network belongs to the classifier's head and
is left out, as in timm's ``feature_info``; the one family where timm keeps it is listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn
from torchvision import ops

from fxcore.graph.operations import axes_of
from fxcore.graph.strides import Strides
from fxcore.layer_types import BATCH_NORMS
from fxcore.models.entry import FeatureMap
from fxcore.tracing.graph_module import called_module
from fxcore.tracing.names import MODULE, PATH, is_under, paths_to

_C_STRIDES = (2, 4, 8, 16, 32)
_DEEPEST = 7  # P7, the coarsest level of RetinaNet's pyramid

# timm ends these at the last 1x1 convolution, whose width belongs to the published architecture's stages.
_HEAD_CONVOLUTION_KEPT = "mobilenet_v3"

_PASS_THROUGH = (*BATCH_NORMS, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Level:
    """A feature map: the node that computes it, its channels, and its stride in input pixels.

    >>> from fxcore import model_graph
    >>> model_graph("resnet18").levels["C5"]
    Level(node='layer4.1.relu_1', channels=512, stride=32)
    """

    node: str
    channels: int
    stride: int


def channels_of(node: fx.Node) -> int | None:
    """Return the size of the channel axis; None if unknown."""
    axes = axes_of(node)
    return int(node.meta["value"].shape[axes.index("C")]) if axes is not None and "C" in axes else None


def find_levels(
    name: str, graph: fx.Graph, root: nn.Module, strides: Strides, maps: Sequence[FeatureMap]
) -> dict[str, Level]:
    """Return the levels of an annotated graph.

    Args:
        name: the model's name, to recognise the listed families.
        graph: a graph annotated by :func:`fxcore.graph.annotate.annotate`.
        root: the module that the graph was traced from.
        strides: the strides of the graph's feature maps.
        maps: the feature maps that the model declares; if there are any, they are the levels.

    Returns:
        Levels in the order C1…C5, P2…; empty if the model has a single resolution (ViT) or no feature maps.
    """
    if maps:
        return _declared(graph, maps, strides)
    last = _backbone_end(graph)
    trunk = _dominators(graph, last) if last is not None else []
    ends = _module_ends(graph)
    by_stride: dict[int, list[fx.Node]] = {}
    for node in trunk:
        stride = strides.of(node.meta.get(PATH, ""))
        if stride is not None and node.meta.get("rows") == 1 and node.op != "placeholder":
            by_stride.setdefault(stride, []).append(node)
    trunks = _trunks(by_stride)
    levels: dict[str, Level] = {}
    for stride in _C_STRIDES:
        nodes = by_stride.get(stride, [])
        if stride == max(by_stride, default=0) and _HEAD_CONVOLUTION_KEPT not in name:
            nodes = _without_head(nodes, root)
        if (picked := _outermost_end(nodes, ends, trunks)) is not None:
            levels[f"C{int(math.log2(stride))}"] = _level(picked, stride)
    return (levels if len(levels) > 1 else {}) | _pyramid(graph, strides)


def _declared(graph: fx.Graph, maps: Sequence[FeatureMap], strides: Strides) -> dict[str, Level]:
    """Return the levels that the model declares: for each module, its last node with the declared channels and stride.

    Nodes that are read outside of the module come before others, and ends of outer modules before those of inner ones:
    the module may end with a reduction to the next stride.
    """
    found: dict[str, Level] = {}
    ends = _module_ends(graph)
    for declared in maps:
        inside = [n for n in graph.nodes if is_under(n.meta.get(PATH, ""), declared.module) and n.meta.get("rows") == 1]
        fitting = [
            n for n in inside if channels_of(n) in (declared.channels, None) and strides.may_be(n, declared.stride)
        ]
        left = [n for n in fitting if not all(is_under(user.meta.get(PATH, ""), declared.module) for user in n.users)]
        if fitting and declared.stride in _C_STRIDES:
            node = left[-1] if left else _outermost_end(fitting, ends, set()) or fitting[-1]
            found[f"C{int(math.log2(declared.stride))}"] = Level(node.meta[PATH], declared.channels, declared.stride)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def _level(node: fx.Node, stride: int) -> Level:
    return Level(node.meta[PATH], channels_of(node) or 0, stride)


def _backbone_end(graph: fx.Graph) -> fx.Node | None:
    """Return the last tensor of the module ``backbone`` if the model has one, else of the graph."""
    tensors: list[fx.Node] = [n for n in graph.nodes if n.op != "output" and isinstance(n.meta.get("value"), Tensor)]
    for part in ("backbone.body", "backbone"):
        inside = [n for n in tensors if is_under(n.meta.get(PATH, ""), part)]
        if inside:
            return inside[-1]
    return tensors[-1] if tensors else None


def _dominators(graph: fx.Graph, sink: fx.Node) -> list[fx.Node]:
    """Return the nodes on every path of tensors from the inputs to ``sink``, in order."""
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
    """Map each node to the paths of the modules that end with it."""
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("output", "placeholder") or not node.meta.get("carries"):
            continue
        for path in paths_to(node.meta.get(MODULE, "")):
            last[path] = node
    ends: dict[fx.Node, list[str]] = {}
    for path, node in last.items():
        ends.setdefault(node, []).append(path)
    return ends


def _trunks(by_stride: dict[int, list[fx.Node]]) -> set[str]:
    """Return the paths of the modules in which the feature map has three strides or more."""
    strides: dict[str, set[int]] = {}
    for stride, nodes in by_stride.items():
        for node in nodes:
            for outer in paths_to(node.meta.get(MODULE, "")):
                strides.setdefault(outer, set()).add(stride)
    return {path for path, passed in strides.items() if len(passed) >= 3}


def _outermost_end(nodes: list[fx.Node], ends: dict[fx.Node, list[str]], trunks: set[str]) -> fx.Node | None:
    """Return the last node that ends an outermost module; modules with children rank before leaves."""

    def rank(node: fx.Node, path: str) -> tuple[bool, int]:
        leaf = node.op == "call_module" and path == node.target
        return leaf, sum(outer not in trunks for outer in paths_to(path))

    ranked = {n: min(rank(n, p) for p in ends[n]) for n in reversed(nodes) if n in ends}
    # Of equals, min returns the first, which is the last in the graph.
    return min(ranked, key=ranked.__getitem__, default=None)


def _without_head(nodes: list[fx.Node], root: nn.Module) -> list[fx.Node]:
    """Drop a final widening 1x1 convolution and the nodes after it."""
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        module = called_module(root, node)
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


def _pyramid(graph: fx.Graph, strides: Strides) -> dict[str, Level]:
    """Return the P levels: the outputs of a feature pyramid's output layers and extra blocks."""
    found: dict[str, Level] = {}
    for node in graph.nodes:
        path = node.meta.get(PATH, "")
        if ".fpn.layer_blocks." not in path and ".fpn.extra_blocks." not in path:
            continue
        stride = strides.of(path)
        makes_map = node.op == "call_module" or path.endswith(".max_pool2d")
        if makes_map and stride is not None and 2 <= math.log2(stride) <= _DEEPEST:
            found[f"P{int(math.log2(stride))}"] = _level(node, stride)
    return dict(sorted(found.items()))
