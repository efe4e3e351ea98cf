"""A graph, a model with weights, and chosen nodes → a pruned module that returns those nodes' values.

The module shares the model's parameters: a hundred extractors over one model cost a hundred graphs, not a hundred
models. Every key is tied to one node, so overlapping names and repeated nodes are no special case.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fxcore.graph.layout import layout_name
from fxcore.graph.levels import stride_of
from fxcore.graph.model_graph import ModelGraph
from fxcore.graph.tokens import TokenGrid, token_grid
from fxcore.tensors import TensorSpec, dtype_name
from fxcore.tracing.frozen import made_constants
from fxcore.tracing.graph_module import GraphModule
from fxcore.tracing.parts import trace_model
from fxcore.tracing.tracer import PATH, record
from fxcore.transforms.base import APPLIED
from fxcore.transforms.out_of_place import functionalize

# Extractors over one model may be built by several threads.
_ADDING = threading.Lock()


@dataclass(frozen=True)
class OutputInfo:
    """One output of an extractor.

    Attributes:
        key: the name that the client gave it.
        node: torchvision's name of the node.
        shape: None for the batch, and for height and width where they follow the image.
        dtype: ``float32``, ``bfloat16``, …
        layout: which axis is what, or None where that is unknown.
        stride: input pixels per position, where the value is a map.
        bytes_per_image: size at the graph's nominal input size.
        rows_per_image: rows of the first dimension that belong to one image (1, but for attention windows).
        tokens: the places that tokens ``[N, L, C]`` stand for; None where it is something else, or they cannot be told.

    >>> from fxcore import get_model, load_model, model_graph
    >>> graph = model_graph("squeezenet1_1")
    >>> model = load_model(get_model("squeezenet1_1"), "random")
    >>> output = build_extractor(graph, model, graph.resolve({"features.5": "early"})).outputs[0]
    >>> output.key, output.shape, output.layout, output.stride, output.bytes_per_image == 4 * 128 * 27 * 27
    ('early', [None, 128, 27, 27], 'NCHW', 8, True)
    """

    key: str
    node: str
    shape: list[int | None]
    dtype: str
    layout: str | None
    stride: int | None
    bytes_per_image: int
    rows_per_image: int
    tokens: TokenGrid | None = None


@dataclass(frozen=True)
class Extractor:
    """A runnable extractor: ``module(*inputs) -> {key: tensor}``, keys in the order asked.

    What its nodes do not need is not there, and what is there is the model's own:

    >>> from fxcore import get_model, load_model, model_graph
    >>> graph = model_graph("squeezenet1_1")
    >>> model = load_model(get_model("squeezenet1_1"), "random")
    >>> extractor = build_extractor(graph, model, graph.resolve(["features.1"]))
    >>> [n.op for n in extractor.module.graph.nodes]
    ['placeholder', 'call_module', 'call_module', 'output']
    >>> extractor.module.get_submodule("features.0").weight is model.features[0].weight
    True
    """

    module: fx.GraphModule
    graph: ModelGraph
    outputs: list[OutputInfo]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the module takes, in order."""
        return self.graph.inputs

    def bytes_for(self, height: int, width: int) -> int:
        """About how many bytes one image's outputs take for an input of that size."""
        nominal_height, nominal_width = self.graph.input_size
        area = (height * width) / (nominal_height * nominal_width)
        return math.ceil(sum(o.bytes_per_image * (area if o.stride else 1) for o in self.outputs))


def build_extractor(
    graph: ModelGraph, model: nn.Module, return_nodes: Mapping[str, str], dtype: torch.dtype = torch.float32
) -> Extractor:
    """Prune ``graph`` to what ``return_nodes`` need and bind it to ``model``.

    Args:
        graph: the model's graph; it is not changed.
        model: from :func:`fxcore.models.weights.load_model`, on its device and in its precision. Its parameters are
            shared.
        return_nodes: key → exact node name, from :meth:`ModelGraph.resolve`.
        dtype: the floating-point type that ``model`` has been cast to.

    Raises:
        CannotTransform: the model writes to memory in a way that cannot be followed; see
            :func:`fxcore.transforms.out_of_place.functionalize`.

    >>> from fxcore import build_extractor, get_model, load_model, model_graph
    >>> graph = model_graph("resnet18")
    >>> model = load_model(get_model("resnet18"), "random")
    >>> extractor = build_extractor(graph, model, graph.resolve({"layer3": "C4", "layer4": "C5"}))
    >>> {key: tuple(value.shape) for key, value in extractor.module(torch.zeros(1, 3, 224, 224)).items()}
    {'C4': (1, 256, 14, 14), 'C5': (1, 512, 7, 7)}
    """
    pruned = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    whole = fx.Graph()
    source = graph.graph
    if graph.entry.is_quantized(graph.weights):
        source = _with_scales_of(model, graph)
    else:
        _add_constants(model, graph, dtype)
    whole.graph_copy(source, copies)
    by_name = {node.meta[PATH]: copies[node] for node in source.nodes if PATH in node.meta}
    functionalize(whole, dict(graph.traced_modules))
    wanted = {key: by_name[name] for key, name in return_nodes.items()}
    needed = _ancestors(list(wanted.values()))
    kept: dict[fx.Node, fx.Node] = {}
    for node in whole.nodes:
        if node in needed or node.op == "placeholder":
            kept[node] = pruned.node_copy(node, lambda n: kept[n])
    results = {key: kept[node] for key, node in wanted.items()}
    for key, node in wanted.items():
        if node.meta["value"].is_quantized:  # int8 models hand out the real numbers that their integers stand for
            results[key] = pruned.call_method("dequantize", (kept[node],))
    pruned.output(results)
    pruned.lint()
    module = GraphModule(model, pruned, class_name=f"{graph.entry.name}_extractor").eval()
    module.meta[APPLIED] = graph.passes
    outputs = [_describe(graph, key, name, dtype) for key, name in return_nodes.items()]
    return Extractor(module, graph, outputs, dtype)


def _with_scales_of(model: nn.Module, graph: ModelGraph) -> fx.Graph:
    """The same graph for an int8 model with weights. torch.fx keeps the scales of int8 additions as plain numbers, and
    those of a model without weights mean nothing."""
    traced, _ = record(model.eval())
    for node, annotated in zip(traced.nodes, graph.graph.nodes, strict=True):
        node.meta = annotated.meta
    return traced


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _add_constants(model: nn.Module, graph: ModelGraph, dtype: torch.dtype) -> None:
    """Give the model the tensors that tracing computes from its buffers; they are few and small.

    The graph's own trace saw the buffers as they were built, before any weights were loaded; so it is the model itself
    that is traced, once.
    """
    with _ADDING:
        if all(hasattr(model, name) for name in graph.constants):
            return
        own = set(vars(model))
        traced, root, _ = trace_model(graph.entry, model)
        # Numbers in the attributes' names go on where an earlier trace of the same model left off; their order stays.
        made = made_constants(traced)
        values = [getattr(root, name) for name in made]
        for name in (set(vars(model)) - own).intersection(made):
            delattr(model, name)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        for name, value in zip(graph.constants, values, strict=True):
            if not hasattr(model, name):
                # One made of numbers in the code was not cast with the model.
                cast = dtype if value.dtype == torch.float32 else value.dtype
                model.register_buffer(name, value.to(device, cast), persistent=False)


def _describe(graph: ModelGraph, key: str, name: str, dtype: torch.dtype) -> OutputInfo:
    node = graph.by_name[name]
    value: Tensor = node.meta["value"]
    made = dtype if value.is_floating_point() else torch.float32 if value.is_quantized else value.dtype
    axes: str | None = node.meta.get("axes")
    shape = graph.shape_of(node) or []
    if axes and len(axes) == len(shape) and not graph.preprocessing.fixed_size:
        shape = [None if axis in "HWL" else size for axis, size in zip(axes, shape, strict=True)]
    return OutputInfo(
        key=key,
        node=node.meta[PATH],
        shape=shape,
        dtype=dtype_name(made),
        layout=layout_name(axes),
        stride=stride_of(node, graph.input_size),
        bytes_per_image=value.numel() * made.itemsize,
        rows_per_image=node.meta["rows"],
        tokens=token_grid(node) if node.meta["rows"] == 1 else None,
    )
