"""The subject of an export, created from an extractor or any graph module, and its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.analysis.verify import flat
from fxcore.edits import EditedNode
from fxcore.errors import BadTensor, FxError, summarize
from fxcore.extractor import Extractor, OutputInfo
from fxcore.graph.annotate import observe
from fxcore.graph.axes.layout import layout_name
from fxcore.graph.axes.row_axes import UNKNOWN
from fxcore.images.preprocessing import Preprocessing
from fxcore.int8.layers import holds_int8
from fxcore.passes.base import applied, fork
from fxcore.passes.fold_normalization import NORMALIZED
from fxcore.photos import input_rows, photos
from fxcore.tensors import TensorSpec, dtype_name
from fxcore.tracing.interpreter import Inputs, positional, require_graph
from fxcore.tracing.names import public_name


class CannotExport(FxError):
    """The model cannot be exported to ``format``."""


@dataclass(frozen=True)
class Subject:
    """The subject of an export.

    Attributes:
        name: the model's name.
        module: a module that takes positional tensors and returns a dict of tensors with the keys of ``outputs``.
        dtype: the module's floating-point dtype.
        inputs, outputs: descriptions of the inputs and outputs, in order; a size of None is dynamic.
        about: weights, fingerprint, preprocessing and edits, for JSON; empty for a graph module.
        examples: returns example inputs, with two rows or more if the number of rows is dynamic.
        windows: number of rows that belong to one image, by name of the scale, of edited values that have several.
    """

    name: str
    module: fx.GraphModule
    dtype: torch.dtype
    inputs: tuple[TensorSpec, ...]
    outputs: list[OutputInfo]
    about: dict[str, Any]
    examples: Callable[[], tuple[Tensor, ...]]
    windows: Mapping[str, int] = field(default_factory=dict)

    def description(self, int8: bool = False) -> dict[str, Any]:
        """Return a description for users of the file, for JSON: inputs, edits, preprocessing, outputs and their nodes.

        Args:
            int8: whether the export quantizes the module.
        """
        dtype = dtype_name(self.dtype)
        return {
            "model": self.name,
            **{key: self.about.get(key) for key in ("weights", "fingerprint")},
            "dtype": dtype,
            "arithmetic": "int8" if int8 or holds_int8(self.module) else dtype,
            "inputs": [{"name": i.name, "layout": i.layout or None, "shape": list(i.shape)} for i in self.inputs],
            "edits": self.about.get("edits", []),
            "preprocessing": self.about.get("preprocessing"),
            "outputs": [{"key": o.key, "node": o.node, "shape": o.shape, "layout": o.layout} for o in self.outputs],
            "transforms": [{"name": a.name, "parameters": dict(a.parameters)} for a in applied(self.module)],
        }


def subject_of(
    source: Extractor | fx.GraphModule,
    example_inputs: Inputs | None,
    preprocessing: Preprocessing | None = None,
    *,
    any_size: bool = True,
) -> Subject:
    """Return the subject of an export.

    Args:
        example_inputs, preprocessing: see :func:`fxcore.exports.export`.
        any_size: whether the file takes maps of any size that the graph takes, not only of the usual one.

    Raises:
        NotAGraph: ``source`` is neither an extractor nor a graph module.
        BadTensor: a graph module is given without inputs, or does not accept them.
        CannotExport: the module has no inputs, or takes or returns values other than tensors.
    """
    if isinstance(source, Extractor):
        return _of_extractor(source, preprocessing, any_size)
    require_graph(source)
    if example_inputs is None:
        raise BadTensor("pass example_inputs, as in example_inputs=(x,): they are needed to export a graph module")
    return _of_module(source, positional(source, example_inputs))


def _of_extractor(extractor: Extractor, preprocessing: Preprocessing | None, any_size: bool) -> Subject:
    graph = extractor.graph
    own = _own_preprocessing(extractor)
    count = None if graph.entry.batch else 1
    preprocessing = preprocessing or own

    def photographs() -> tuple[Tensor, ...]:
        """Return two photographs, or the one that the model takes, as inputs of the graph's size, in the extractor's
        dtype."""
        rows = input_rows(preprocessing or graph.preprocessing, graph.inputs, photos()[: count or 2], graph.input_size)
        batch = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        # The weights' own preprocessing may give another size.
        sized = [nn.functional.interpolate(x, (*x.shape[2:-2], *graph.input_size)) for x in batch]
        return extractor.inputs_from(tuple(x.to(extractor.dtype) for x in sized))

    about: dict[str, Any] = {
        "weights": graph.weights,
        "fingerprint": graph.fingerprint,
        "preprocessing": preprocessing.describe() if preprocessing is not None and extractor.part is None else None,
    }
    factors, own_inputs, outputs = _factors(extractor), extractor.inputs, extractor.outputs
    if not any_size:
        own_inputs, outputs = _of_usual_size(extractor)
    scales, shifts = factors[::2], factors[1::2]
    about["edits"] = [
        {"node": node.name, "scale": scale.name, "shift": shift.name}
        for node, scale, shift in zip(extractor.edited, scales, shifts, strict=True)
    ]
    windows = {scale.name: node.rows for node, scale in zip(extractor.edited, scales, strict=True) if node.rows > 1}
    inputs = tuple(replace(spec, shape=(count, *spec.shape[1:])) for spec in (*own_inputs, *factors))
    outputs = [replace(output, shape=[count, *output.shape[1:]]) for output in outputs]
    return Subject(graph.entry.name, extractor.module, extractor.dtype, inputs, outputs, about, photographs, windows)


def _own_preprocessing(extractor: Extractor) -> Preprocessing | None:
    """Return how images become inputs of an extractor according to its model's weights.

    None if their preprocessing gives images of another size, or normalises otherwise than what is folded in.
    """
    own, size = extractor.graph.preprocessing, extractor.graph.input_size
    if own.fixed_size and own.nominal_size() != size:
        return None
    folded = extractor.module.meta.get(NORMALIZED)
    if folded is None:
        return own
    normalization = own.normalization()
    same = normalization is not None and folded == dict(zip(("mean", "std"), normalization, strict=True))
    return own.without_normalization() if same else None


def _of_usual_size(extractor: Extractor) -> tuple[tuple[TensorSpec, ...], list[OutputInfo]]:
    """Return the inputs and outputs with the sizes that they have for an image of the graph's size."""
    rows = [spec.usual or tuple(size or 1 for size in spec.shape[1:]) for spec in extractor.inputs]
    values = extractor.values_at(rows)
    inputs = tuple(replace(spec, shape=(None, *row)) for spec, row in zip(extractor.inputs, rows, strict=True))
    return inputs, [replace(o, shape=[*o.shape[:1], *values[o.node][0][1:]]) for o in extractor.outputs]


def _factors(extractor: Extractor) -> list[TensorSpec]:
    """Describe the inputs that the extractor has for its edits: scale and shift of each edited node, in order.

    They are as large as factors that differ by channel only.
    """
    given = [torch.empty(1, *(spec.usual or [size or 1 for size in spec.shape[1:]])) for spec in extractor.inputs]
    values = extractor.factors([], *given)
    placeholders = extractor.module.graph.find_nodes(op="placeholder")[len(given) : len(given) + len(values)]
    layouts = [layout for node in extractor.edited for layout in [_layout(node)] * 2]
    return [
        TensorSpec(str(placeholder.target), layout, (None, *value.shape[1:]))
        for placeholder, layout, value in zip(placeholders, layouts, values, strict=True)
    ]


def _layout(edited: EditedNode) -> str:
    """Return the layout of a node's factors; empty if it is unknown, or has windows, for which there is no name."""
    return "" if edited.rows > 1 or UNKNOWN in edited.axes else layout_name(edited.axes) or ""


def _of_module(module: fx.GraphModule, inputs: tuple[Any, ...]) -> Subject:
    name = type(module).__name__
    private = fork(module)
    placeholders = private.graph.find_nodes(op="placeholder")
    if not placeholders:
        raise CannotExport(f"{name} has no inputs: there is nothing to compute")
    if len(placeholders) != len(inputs) or not all(isinstance(value, Tensor) for value in inputs):
        raise CannotExport(
            f"{name} takes {', '.join(n.name for n in placeholders)}, and a file takes tensors only; fix "
            "other arguments by trace(…, concrete_args=…)"
        )
    try:
        observe(private, inputs)
    except Exception as error:
        raise BadTensor(f"{name} cannot take these example inputs: {summarize(error)}") from error
    output = private.graph.output_node()
    returned = output.args[0]
    found = {"output": returned} if isinstance(returned, fx.Node) else flat(returned)
    wrong = [key for key, n in found.items() if not isinstance(n, fx.Node) or not isinstance(n.meta["value"], Tensor)]
    if wrong or not found:
        raise CannotExport(
            f"{name} returns {'a value that is not a tensor as ' + wrong[0] if wrong else 'nothing'}; choose tensors "
            "with create_extractor"
        )
    output.args = (found,)
    rows = inputs[0].shape[0] if inputs[0].ndim else 0
    specs = tuple(TensorSpec(str(n.target), "", _free(x, rows)) for n, x in zip(placeholders, inputs, strict=True))
    outputs = [_output(key, node, rows) for key, node in found.items()]
    floating = [t for t in (*inputs, *private.parameters()) if t.is_floating_point()]
    dtype = floating[0].dtype if floating else torch.float32
    for node in private.graph.nodes:
        node.meta.pop("value")
    private.recompile()
    return Subject(name, private, dtype, specs, outputs, {}, lambda: tuple(x.clone() for x in inputs))


def _output(key: str, node: fx.Node, rows: int) -> OutputInfo:
    value: Tensor = node.meta["value"]
    one = value.nbytes // rows if rows else value.nbytes
    return OutputInfo(key, public_name(node), [*_free(value, rows)], dtype_name(value.dtype), None, None, one, 1)


def _free(value: Tensor, rows: int) -> tuple[int | None, ...]:
    """Return the shape of ``value``, with None for a first dimension of ``rows``, which is dynamic."""
    shape: list[int | None] = list(value.shape)
    if shape and rows > 1 and shape[0] == rows:
        shape[0] = None
    return tuple(shape)
