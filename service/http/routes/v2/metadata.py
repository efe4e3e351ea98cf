"""Names in ``/v2``, which are extractors or models, and descriptions of their tensors.

A model's default outputs are its levels, or its last value if it has none; requests may name any node. Its weights are
``DEFAULT``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from fxcore.errors import BadTensor, NotTraceable, UnknownModel
from fxcore.graph.model_graph import ModelGraph, model_graph
from fxcore.graph.model_part import ModelPart
from fxcore.images.preprocessing import Preprocessing
from fxcore.models.entry import ModelEntry
from fxcore.tensors import TensorSpec, returned_dtype
from service import problems
from service.codecs.tensors.datatypes import V2_NAMES
from service.codecs.v2 import BYTES, IMAGE
from service.engine import ExtractorRecord
from service.engine.extractors.resolving import own_nodes
from service.engine.memory.graphs import graph_for
from service.engine.options import VALID_BOX
from service.http.scope import Caller
from service.http.state import OwnTensors, State
from service.problems import UnknownExtractor
from service.schemas.specs import ExtractorSpec
from service.schemas.v2 import ModelMetadata, RepositoryEntry, TensorMetadata

VERSION = "1"

Target = ExtractorRecord | ModelEntry
"""What the protocol calls a model."""


async def find(state: State, caller: Caller, name: str, version: str = VERSION) -> Target:
    """Find an extractor by id or name, or else a model. A failed extractor does not hide a model of the same name.

    Raises:
        Problem: 404: neither exists, or not in that version.
        NotTraceable: it is an operator's own model, and cannot be traced.
        NotReady: neither is in memory, and the store of extractors cannot be read.
    """
    target = await _any_version(state, caller, name)
    if version != VERSION:
        detail = f"{name} has no version {version[:64]!r}, only {VERSION}"
        raise problems.UnknownModel(detail, suggestions=[name])
    return target


async def _any_version(state: State, caller: Caller, name: str) -> Target:
    record = await state.engine.extractors.known(name)
    if record is not None and record.state != "failed":
        return record
    try:
        model = await state.model(caller, name)
    except (UnknownModel, NotTraceable) as no_model:
        try:
            return await state.engine.extractors.look_up(name)
        except UnknownExtractor as no_extractor:
            if isinstance(no_model, NotTraceable):
                raise no_model from None
            near = [*no_extractor.extra["suggestions"], *no_model.extra["suggestions"]]
            hint = f"; did you mean {', '.join(near)}?" if near else "; POST /v2/repository/index lists all"
            detail = f"there is no extractor or model {name!r}{hint}"
            raise problems.UnknownModel(detail, suggestions=near) from None
    return await state.engine.extractors.namesake(name) or model if record is None else model


async def own_spec(
    state: State, caller: Caller, entry: ModelEntry, weights: str = "DEFAULT", nodes: Sequence[str] = ()
) -> ExtractorSpec:
    """Build the spec of the extractor that serves a model."""
    if not nodes:
        nodes = (await _own(state, caller, entry, entry.structure(weights))).nodes
    return ExtractorSpec(model=entry.name, weights=weights, return_nodes=list(nodes))


async def inputs_of(state: State, caller: Caller, target: Target) -> list[TensorMetadata]:
    """List the inputs that ``target`` accepts."""
    if isinstance(target, ExtractorRecord):
        return inputs(target.description.inputs, target.description.preprocessing)
    return (await _own(state, caller, target, target.structure())).inputs


async def _own(state: State, caller: Caller, entry: ModelEntry, structure: str) -> OwnTensors:
    """Return the default tensors of a model, cached per structure."""
    key = entry.name, structure
    own = state.own_tensors.get(key)
    if own is None:

        def look_up() -> OwnTensors:
            graph = model_graph(entry, structure)
            return OwnTensors(inputs(graph.inputs, graph.preprocessing), own_nodes(graph))

        own = state.own_tensors[key] = await state.trace(caller, look_up)
    return own


def describe(name: str, target: Target) -> ModelMetadata:
    """Describe the tensors of an extractor, built or not, or of a model, which has this ``name``.

    It may trace the model, so run it in a thread.
    """
    if isinstance(target, ExtractorRecord):
        own, preprocessing, runtime = target.description, target.description.preprocessing, target.runtime
        graph = runtime.extractor.graph if runtime is not None else graph_for(own.spec, own.entry, own.weights)
        part = ModelPart(graph, own.begins_at, own.return_nodes) if own.begins_at else None
        accepted = inputs(own.inputs, preprocessing)
        outputs = _outputs(part or graph, preprocessing, own.return_nodes, own.entry.dtype, own.dtype)
        if own.spec.fit == "pad":
            outputs.append(TensorMetadata(name=VALID_BOX, datatype="FP32", shape=[-1, 4]))
    else:
        graph = model_graph(target, target.structure())
        accepted = inputs(graph.inputs, graph.preprocessing)
        outputs = _outputs(graph, graph.preprocessing, graph.resolve(own_nodes(graph)), target.dtype, target.dtype)
    return ModelMetadata(name=name, versions=[VERSION], platform="torch.fx", inputs=accepted, outputs=outputs)


def inputs(specs: Sequence[TensorSpec], preprocessing: Preprocessing) -> list[TensorMetadata]:
    """List the accepted inputs: encoded images, if the model accepts single ones, and the model's own tensors."""
    if any(spec.node is not None for spec in specs):
        return [
            TensorMetadata(name=spec.name, datatype="FP32", shape=[-1, *(n or -1 for n in spec.shape[1:])])
            for spec in specs
        ]
    size = list(preprocessing.nominal_size()) if preprocessing.fixed_size else [-1, -1]
    tensors = [
        TensorMetadata(name=spec.name, datatype="FP32", shape=[-1, *(n or -1 for n in spec.shape[1:-2]), *size])
        for spec in specs
    ]
    if not preprocessing.takes_images or len(specs) != 1:
        return tensors
    return [TensorMetadata(name=IMAGE, datatype=BYTES, shape=[-1]), *tensors]


def _outputs(
    graph: ModelGraph | ModelPart,
    preprocessing: Preprocessing,
    nodes: dict[str, str],
    own: torch.dtype,
    dtype: torch.dtype,
) -> list[TensorMetadata]:
    usual, others = _shapes(graph, preprocessing)
    values = _values(graph, nodes, usual)
    try:
        of_others = values if others == usual else _values(graph, nodes, others)
    except BadTensor:
        of_others = values
    return [
        TensorMetadata(
            name=key,
            datatype=V2_NAMES[returned_dtype(made, own, dtype)],
            shape=[-1, *_common(shape, of_others[key][0])],
        )
        for key, (shape, made) in values.items()
    ]


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the sizes that two shapes have in common, and -1 for the others.

    All are -1 if one shape has an additional dimension for windows.
    """
    if len(one) != len(other):
        return [-1] * len(one)
    return [a if a == b else -1 for a, b in zip(one, other, strict=True)]


_Shapes = list[tuple[int, ...]]
"""The shape of one row of each input."""


def _shapes(graph: ModelGraph | ModelPart, preprocessing: Preprocessing) -> tuple[_Shapes, _Shapes]:
    """Return the usual shapes, and other shapes that differ in every dimension that accepts any size."""
    if isinstance(graph, ModelPart):
        return [spec.usual for spec in graph.inputs], [
            tuple(2 * one if size is None else one for one, size in zip(spec.usual, spec.shape[1:], strict=True))
            for spec in graph.inputs
        ]
    height, width = preprocessing.nominal_size()
    more = (0, 0) if preprocessing.fixed_size else (64, 128)
    channels = [tuple(n or 1 for n in spec.shape[1:-2]) for spec in graph.inputs]
    return [(*c, height, width) for c in channels], [(*c, height + more[0], width + more[1]) for c in channels]


def _values(
    graph: ModelGraph | ModelPart, nodes: dict[str, str], rows: _Shapes
) -> dict[str, tuple[list[int], torch.dtype]]:
    """Map each key to the shape of one image's value, and its dtype."""
    found = {}
    values = graph.values_at(rows, set(nodes.values()))
    for key, node in nodes.items():
        shape, dtype = values[node]
        # Attention windows have several rows per image, which are returned in a separate dimension.
        found[key] = (shape[1:] if shape[0] == 1 else shape, dtype)
    return found


def entries(state: State, targets: Iterable[Target]) -> Iterator[RepositoryEntry]:
    """Yield the state of each extractor, and of each model's default weights. Any thread may iterate over it."""
    loaded = state.engine.models.loaded_weights()
    records = state.engine.records.list()
    building = {
        (record.description.spec.model, record.description.weights) for record in records if record.build is not None
    }

    def entry(target: Target) -> RepositoryEntry:
        if isinstance(target, ExtractorRecord):
            name, problem = target.name or target.id, target.problem
            is_ready, is_building = target.runtime is not None, target.build is not None
        else:
            name, problem = target.name, None
            weights = (target.name, target.default_weights)
            is_ready, is_building = weights in loaded, weights in building
        if is_ready:
            return RepositoryEntry(name=name, version=VERSION, state="READY", reason="")
        if is_building:
            return RepositoryEntry(name=name, version=VERSION, state="LOADING", reason="it is being built")
        reason = problem.detail if problem is not None else "it is not loaded"
        return unloaded(name, reason)

    return map(entry, targets)


def unloaded(name: str, reason: str) -> RepositoryEntry:
    """Return the entry of an extractor or a model that is not in memory."""
    return RepositoryEntry(name=name, version=VERSION, state="UNAVAILABLE", reason=reason)
