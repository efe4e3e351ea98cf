"""Build extractors: from a graph, a model with weights and chosen nodes, a pruned module that returns their values.

The module shares the model's parameters, so another extractor over a model costs only a graph. Each key belongs to one
node, so overlapping names and repeated nodes are not special cases.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fxcore.edits import BadEdit, Edit, EditedNode, PlannedFactors, edited_node, insert_edits
from fxcore.errors import BadArgument
from fxcore.graph.attention_weights import is_attention_of_tokens
from fxcore.graph.axes.row_axes import output_layout
from fxcore.graph.cut import Part, Scale, cut, pruned
from fxcore.graph.model_graph import ModelGraph
from fxcore.graph.model_part import ModelPart
from fxcore.graph.tokens.attention_grid import AttentionGrid, attention_grid
from fxcore.graph.tokens.prefix_tokens import NO_PREFIX, PrefixTokens
from fxcore.graph.tokens.token_grid import TokenGrid, prefix_tokens, token_grid
from fxcore.passes.base import APPLIED
from fxcore.passes.functionalize import functionalize
from fxcore.tensors import TensorSpec, dtype_name, returned_dtype
from fxcore.tracing.constants import made_constants
from fxcore.tracing.graph_module import GraphModule
from fxcore.tracing.interpreter import on_device
from fxcore.tracing.names import PATH
from fxcore.tracing.parts import trace_model
from fxcore.tracing.tracer import record

# Extractors over one model may be built by several threads.
_ADDING = threading.Lock()


@dataclass(frozen=True)
class OutputInfo:
    """An output of an extractor.

    Attributes:
        key: name in the output dict.
        node: torchvision's name of the node.
        shape: shape, with None for the batch, and for height and width if they depend on the image.
        dtype: ``float32``, ``bfloat16``, …
        layout: axes such as ``NCHW``, of which some may be unknown (``N??C``); None if unknown.
        stride: input pixels per position of a feature map; None for other values.
        bytes_per_image: size in bytes at the graph's input size.
        rows_per_image: rows of the first dimension that belong to one image (1 except for attention windows).
        tokens: the image positions of tokens ``[N, L, C]``; None for other values, or if unknown.
        prefix: the tokens that do not stand for a position; empty for other values.
        attention: the map whose positions attend to each other, for the weights that ``attention_maps`` adds.
        queries: whether the values are attention weights ``[…, queries, keys]`` over tokens.

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
    prefix: PrefixTokens = NO_PREFIX
    attention: AttentionGrid | None = None
    queries: bool = False


@dataclass(frozen=True)
class Extractor:
    """A module that returns the values of chosen nodes of a model.

    Attributes:
        module: ``module(*inputs) -> {key: tensor}``, with keys in the order of ``outputs``.
        graph: the model's graph that the extractor was built from.
        outputs: the outputs, in order.
        dtype: the floating-point dtype of the parameters.
        part: the part of the model that it computes, if it starts at inner nodes; else None.
        front: ``front(*inputs) -> {key: tensor}``, which computes the extractor's inputs from the model's, if it starts
            at inner nodes; else None.
        edited: the nodes whose values it edits; the module has a scale and a shift for each as additional inputs.

    The module has only the nodes that the outputs need, and shares the model's parameters:

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
    part: ModelPart | None = None
    front: fx.GraphModule | None = None
    edited: tuple[EditedNode, ...] = ()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the module, in order."""
        return self.graph.inputs if self.part is None else self.part.inputs

    @property
    def nodes(self) -> int:
        """Total number of nodes of its graphs."""
        graphs = [one.graph for one in (self.module, self.front, self.part) if one is not None]
        return sum(len(graph.nodes) for graph in graphs)

    def inputs_from(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the extractor's inputs from ``inputs`` of the model.

        These are the values of the nodes that it starts at, and example factors for its edits.
        """
        if self.front is not None:
            with torch.no_grad():
                values = self.front(*inputs)
            inputs = tuple(values[spec.name].reshape(len(inputs[0]), *spec.usual) for spec in self.inputs)
        return inputs + self.factors([Edit(node.key, scale=0.5, shift=0.25) for node in self.edited], *inputs)

    def factors(self, edits: Sequence[Edit], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the module's inputs for some edits, to pass after ``inputs``: scale and shift of each edited node.

        Raises:
            BadEdit: an edit is of a node that the extractor does not edit, or selects parts that do not exist.
        """
        names = {name for node in self.edited for name in (node.key, node.name)}
        for index, edit in enumerate(edits):
            if edit.node not in names:
                shown = ", ".join(node.key for node in self.edited) or "none"
                raise BadEdit(f"edit {index}: this extractor edits {shown}, but not {edit.node!r}", edit=index)
        if not self.edited:
            return ()
        dims = self.values_at([tuple(x.shape[1:]) for x in inputs])
        size = None if self.part is not None else (inputs[0].shape[-2], inputs[0].shape[-1])
        found: list[Tensor] = []
        for node in self.edited:
            planned = PlannedFactors(node, edits, len(inputs[0]), dims[node.name][0], size, self.dtype)
            found += planned.make().of(slice(None))
        return tuple(factor.to(inputs[0].device) for factor in found)

    def values_at(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return shape and dtype of outputs, edited nodes and their ancestors by node, for one row, computing nothing.

        Args:
            shapes: the shape of each input without its batch dimension.

        Raises:
            BadTensor: the model does not accept inputs of that shape.
        """
        # Outputs that read what an edited node writes in place need not be its descendants in the model's graph.
        wanted = {output.node for output in self.outputs} | {node.name for node in self.edited}
        return (self.part or self.graph).values_at(shapes, wanted)


def build_extractor(
    graph: ModelGraph,
    model: nn.Module,
    return_nodes: Mapping[str, str],
    dtype: torch.dtype = torch.float32,
    *,
    any_size: bool | None = None,
    inputs: Mapping[str, str] | None = None,
    edits: Mapping[str, str] | None = None,
) -> Extractor:
    """Prune ``graph`` to the nodes that ``return_nodes`` need, and bind it to ``model``.

    Args:
        graph: the model's graph; it is not changed.
        model: a model from :func:`fxcore.models.weights.load_model`, possibly moved, and possibly with its tensors of
            the entry's dtype cast. The module shares its parameters and modules; backends fold them once for all
            extractors over a model.
        return_nodes: exact node names by key, from :meth:`ModelGraph.resolve`.
        dtype: the floating-point dtype that these tensors were cast to.
        any_size: whether inputs vary in size, so that the described outputs have no fixed size; by default determined
            by the model's own preprocessing. With ``inputs``, determined by whether their maps may have any size.
        inputs: exact names of the nodes to start from, by key, from :meth:`ModelGraph.resolve`; by default the model's
            inputs.
        edits: exact names of the nodes to edit, by key, from :meth:`ModelGraph.resolve`; see
            :meth:`Extractor.factors`.

    Raises:
        BadArgument: ``graph`` is not a :class:`ModelGraph`, or ``return_nodes``, ``inputs`` or ``edits`` are not exact
            names of its nodes.
        BadEdit: a node to edit does not have floating-point values, lies before ``inputs``, or no output depends on it.
        OpenCut, UnneededInput, DuplicateKey, UnknownNode: see :class:`~fxcore.graph.model_part.ModelPart`.
        CannotTransform: the model's in-place operations cannot be rewritten; see
            :func:`fxcore.passes.functionalize.functionalize`.

    >>> from fxcore import build_extractor, get_model, load_model, model_graph
    >>> graph = model_graph("resnet18")
    >>> model = load_model(get_model("resnet18"), "random")
    >>> extractor = build_extractor(graph, model, graph.resolve({"layer3": "C4", "layer4": "C5"}))
    >>> {key: tuple(value.shape) for key, value in extractor.module(torch.zeros(1, 3, 224, 224)).items()}
    {'C4': (1, 256, 14, 14), 'C5': (1, 512, 7, 7)}
    >>> half = build_extractor(graph, model, graph.resolve(["C5"]), inputs=graph.resolve(["layer3"]))
    >>> half.module(torch.zeros(1, 256, 14, 14))["C5"].shape
    torch.Size([1, 512, 7, 7])
    >>> edited = build_extractor(graph, model, graph.resolve(["C5"]), edits=graph.resolve(["layer4"]))
    >>> image = torch.zeros(1, 3, 224, 224)
    >>> edited.module(image, *edited.factors([Edit("layer4", scale=0, shift=2.5)], image))["C5"].unique()
    tensor([2.5000])
    """
    if not isinstance(graph, ModelGraph):
        raise BadArgument(f"graph is what model_graph returns, not {graph!r:.100}")
    for name, named in (("return_nodes", return_nodes), ("inputs", inputs or {}), ("edits", edits or {})):
        exact = named.values() if isinstance(named, Mapping) else [None]
        if any(not isinstance(node, str) or node not in graph.by_name for node in exact):
            raise BadArgument(f"{name} is what graph.resolve returns, not {named!r:.100}")
    part = ModelPart(graph, inputs, return_nodes) if inputs else None
    varies = not graph.preprocessing.fixed_size if any_size is None else any_size
    if part is not None:
        varies = any(None in spec.shape[1:] for spec in part.inputs)
    outputs = [_describe(graph, key, name, dtype, varies) for key, name in return_nodes.items()]
    edited = tuple(edited_node(key, graph.by_name[name], graph.input_size) for key, name in (edits or {}).items())
    whole, by_name = _bound(graph, model, dtype, with_output=False)
    wanted = {key: by_name[name] for key, name in return_nodes.items()}
    front = None
    if inputs:
        given = {key: by_name[name] for key, name in inputs.items()}
        front = _module(graph, model, pruned(whole, given.values()), given)
        kept = cut(
            whole,
            given,
            wanted.values(),
            scales=_scales(graph, model, whole, given.values()),
            dtypes=(graph.entry.dtype, dtype),
        )
    else:
        kept = pruned(whole, wanted.values())
    insert_edits(kept, edited, by_name)
    return Extractor(_module(graph, model, kept, wanted), graph, outputs, dtype, part, front, edited)


def _module(graph: ModelGraph, model: nn.Module, part: Part, wanted: Mapping[str, fx.Node]) -> fx.GraphModule:
    """Return a module for ``part`` that returns the values of ``wanted`` by key."""
    results = {key: part.kept[node] for key, node in wanted.items()}
    for key, node in wanted.items():
        if node.meta["value"].is_quantized:  # outputs of int8 models are dequantized
            results[key] = part.graph.call_method("dequantize", (part.kept[node],))
    part.graph.output(results)
    part.graph.lint()
    module = GraphModule(model, part.graph, class_name=f"{graph.entry.name}_extractor").eval()
    module.meta[APPLIED] = graph.passes
    return module


def _scales(graph: ModelGraph, model: nn.Module, whole: fx.Graph, given: Collection[fx.Node]) -> dict[fx.Node, Scale]:
    """Run an int8 model to find the scales of the quantized nodes among ``given``."""
    quantized = [node for node in given if node.meta["value"].is_quantized]
    if not quantized:
        return {}
    front = pruned(whole, quantized)
    front.graph.output([front.kept[node] for node in quantized])
    with torch.no_grad():
        values = fx.GraphModule(model, front.graph)(*(torch.zeros([d or 1 for d in i.shape]) for i in graph.inputs))
    return {node: (value.q_scale(), value.q_zero_point()) for node, value in zip(quantized, values, strict=True)}


def whole_module(graph: ModelGraph, model: nn.Module, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """Bind all of ``graph`` to ``model``; the result has the model's return value. See :func:`build_extractor`."""
    whole, _ = _bound(graph, model, dtype, with_output=True)
    return GraphModule(model, whole, class_name=type(model).__name__)


def _bound(
    graph: ModelGraph, model: nn.Module, dtype: torch.dtype, with_output: bool
) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Return a copy of ``graph`` without in-place operations, for the device of ``model``, and its nodes by public
    name."""
    copies: dict[fx.Node, fx.Node] = {}
    whole = fx.Graph()
    source = graph.graph
    if graph.entry.is_quantized(graph.weights):
        source = _with_scales_of(model, graph)
    else:
        _add_constants(model, graph, dtype)
    returned = whole.graph_copy(source, copies)
    if with_output:
        whole.output(returned)
    device = _device_of(model)
    for node in whole.nodes:
        node.args, node.kwargs = on_device(node.args, node.kwargs, device)
    by_name = {node.meta[PATH]: copies[node] for node in source.nodes if PATH in node.meta}
    functionalize(whole, dict(graph.traced_modules))
    return whole, by_name


def _with_scales_of(model: nn.Module, graph: ModelGraph) -> fx.Graph:
    """Trace an int8 model with weights, and copy the annotations of ``graph``.

    torch.fx records the scales of int8 additions as numbers, and those of a model without weights are meaningless.
    """
    traced, _ = record(model.eval())
    for node, annotated in zip(traced.nodes, graph.graph.nodes, strict=True):
        node.meta = annotated.meta
    return traced


def _add_constants(model: nn.Module, graph: ModelGraph, dtype: torch.dtype) -> None:
    """Add the constants of ``graph`` to the model as buffers, with values computed from the model's own buffers.

    The graph was traced before weights were loaded, so the model is traced again, once. Constants are few and small.
    """
    with _ADDING:
        if all(hasattr(model, name) for name in graph.constants):
            return
        own = set(vars(model))
        traced, root, _ = trace_model(graph.entry, model)
        # After an earlier trace the numbers in the attributes' names may differ, but their order is the same.
        made = made_constants(traced)
        values = [getattr(root, name) for name in made]
        for name in (set(vars(model)) - own).intersection(made):
            delattr(model, name)
        device = _device_of(model)
        for name, value in zip(graph.constants, values, strict=True):
            if not hasattr(model, name):
                # Constants from literals in the code were not cast with the model.
                cast = dtype if value.dtype == graph.entry.dtype else value.dtype
                model.register_buffer(name, value.to(device, cast), persistent=False)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _describe(graph: ModelGraph, key: str, name: str, dtype: torch.dtype, any_size: bool) -> OutputInfo:
    node = graph.by_name[name]
    value: Tensor = node.meta["value"]
    made = returned_dtype(value.dtype, graph.entry.dtype, dtype)
    axes: str | None = node.meta.get("axes")
    shape = graph.shape_of(node) or []
    if axes and len(axes) == len(shape) and any_size:
        shape = [None if axis in "THWL" else size for axis, size in zip(axes, shape, strict=True)]
    return OutputInfo(
        key=key,
        node=node.meta[PATH],
        shape=shape,
        dtype=dtype_name(made),
        layout=output_layout(node),
        stride=graph.stride_of(node),
        bytes_per_image=value.numel() * made.itemsize,
        rows_per_image=node.meta["rows"],
        tokens=token_grid(node) if node.meta["rows"] == 1 else None,
        prefix=prefix_tokens(node) if node.meta["rows"] == 1 else NO_PREFIX,
        attention=attention_grid(node),
        queries=is_attention_of_tokens(node),
    )
