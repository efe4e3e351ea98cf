"""A part of a model between inner nodes, without weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from fxcore.errors import BadTensor, DuplicateKey, UnknownNode, summarize
from fxcore.graph.annotate import values_at
from fxcore.graph.axes.layout import layout_name
from fxcore.graph.cut import OpenCut, cut
from fxcore.graph.model_graph import LARGEST_COMPUTED, ModelGraph
from fxcore.graph.node_info import is_extractable
from fxcore.passes.functionalize import functionalize
from fxcore.tensors import TensorSpec, dtype_name, returned_dtype
from fxcore.tracing.names import PATH


class ModelPart:
    """The part of a model between some of its inner nodes.

    Args:
        graph: the model's graph; it is not changed.
        inputs: exact names of the nodes to start from by key, from :meth:`ModelGraph.resolve`.
        return_nodes: exact names of the nodes to end at, by key.

    Attributes:
        inputs: the part's inputs, in order. Frames, height and width of a map are None, unless a size of the
            image is a constant in the graph.
        graph: the graph from the inputs to the nodes to end at.
        fixed: whether a size of the image is a constant in the graph, which then supports only that size.

    Raises:
        OpenCut: ``return_nodes`` depend on the image by a path that avoids ``inputs``; ``missing`` would close the cut.
        UnneededInput: ``return_nodes`` do not depend on one of ``inputs``.
        DuplicateKey, UnknownNode: one of ``inputs`` cannot be an input.
        CannotTransform: the model's in-place operations cannot be rewritten.

    >>> from fxcore import model_graph
    >>> part = ModelPart(model_graph("resnet18"), {"C3": "layer2.1.relu_1"}, {"C4": "layer3.1.relu_1"})
    >>> [(spec.name, spec.node, spec.shape) for spec in part.inputs]
    [('C3', 'layer2.1.relu_1', (None, 128, None, None))]
    """

    def __init__(self, graph: ModelGraph, inputs: Mapping[str, str], return_nodes: Mapping[str, str]) -> None:
        check_inputs(graph, inputs)
        self._model, self._device, self._dtype = graph.entry.name, graph.device, graph.entry.dtype
        whole = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        whole.graph_copy(graph.graph, copies)
        functionalize(whole, dict(graph.traced_modules))
        given = {key: copies[graph.by_name[name]] for key, name in inputs.items()}
        wanted = [copies[graph.by_name[name]] for name in return_nodes.values()]
        part = cut(
            whole,
            given,
            wanted,
            lambda n: PATH in n.meta and is_extractable(n) and _is_floating(n),
            dtypes=(self._dtype, self._dtype),
        )
        part.graph.output(tuple(part.kept[node] for node in wanted))
        self.graph, self.fixed = part.graph, part.fixed
        # Not the traced module, whose parameters may be on another device, and which lacks what transforms added.
        owner = graph.graph.owning_module
        assert owner is not None, "the graph of a model belongs to a module"
        self._module = fx.GraphModule(owner, part.graph)
        self.inputs = tuple(_spec(key, node, part.fixed) for key, node in given.items())

    def values_at(
        self, shapes: Sequence[tuple[int, ...]], wanted: Collection[str]
    ) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return shape and dtype of the values of ``wanted`` nodes and of their ancestors, for one image.

        See :meth:`ModelGraph.values_at`.

        Raises:
            BadTensor: the part does not accept inputs of that shape, or must be run and they are too large.
        """
        shown = ", ".join(f"{spec.name} {list(shape)}" for spec, shape in zip(self.inputs, shapes, strict=True))
        usual = sum(math.prod(spec.usual or ()) for spec in self.inputs)
        if self._device.type != "meta" and sum(map(math.prod, shapes)) > LARGEST_COMPUTED * usual:
            raise BadTensor(
                f"this part of {self._model} is run to know its shapes, which takes memory: {shown} is more than "
                f"{LARGEST_COMPUTED} times its usual size"
            )
        try:
            return values_at(self._module, shapes, self._device, wanted, self._dtype)
        except Exception as error:
            raise BadTensor(f"this part of {self._model} cannot take {shown}: {summarize(error)}") from error


def closed(graph: ModelGraph, at: str, of: str) -> list[str]:
    """Return the names of a closed cut that starts with ``at``: ``of`` depends on the image only through these nodes.

    Raises:
        UnneededInput: ``of`` does not depend on ``at``.
        UnknownNode: there is no such node, or it cannot be an input.

    >>> from fxcore import model_graph
    >>> closed(model_graph("resnet18"), "layer2.0.conv1", "fc")
    ['layer2.0.conv1', 'layer2.0.downsample.1']
    """
    begin = [at]
    while True:
        try:
            ModelPart(graph, graph.resolve(begin), graph.resolve([of]))
            return begin
        except OpenCut as error:
            begin += error.extra["missing"]


def check_inputs(graph: ModelGraph, inputs: Mapping[str, str]) -> None:
    """Check that nodes can be inputs of a part.

    Raises:
        DuplicateKey: a node is named twice.
        UnknownNode: a node does not have floating-point values.
    """
    for key, name in inputs.items():
        if list(inputs.values()).count(name) > 1:
            raise DuplicateKey(f"the input {key!r} is {name}, which is an input already; name each node once", key=key)
        if not _is_floating(graph.by_name[name]):
            shown = dtype_name(graph.by_name[name].meta["value"].dtype)
            detail = f"{name!r} has values of {shown}; begin at a node of floating-point numbers"
            raise UnknownNode(detail, name=key, suggestions=[])


def _is_floating(node: fx.Node) -> bool:
    return returned_dtype(node.meta["value"].dtype, torch.float32, torch.float32).is_floating_point


def _spec(key: str, node: fx.Node, fixed: bool) -> TensorSpec:
    value, axes = node.meta["value"], node.meta.get("axes")
    rows = node.meta["rows"]
    usual = tuple(value.shape[1:]) if rows == 1 else (rows, *value.shape[1:])
    free = axes is not None and rows == 1 and not fixed and len(axes) == value.ndim
    sizes = [None if free and axis in "THW" else size for axis, size in zip((axes or "")[1:], usual, strict=False)]
    shape = (None, *(sizes if free else usual))
    return TensorSpec(key, layout_name(axes) or "" if rows == 1 else "", shape, node.meta[PATH], usual)
