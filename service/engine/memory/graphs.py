"""The graphs that extractors are pruned from, and the cached ones that may be evicted."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxcore.errors import BadTensor
from fxcore.graph.model_graph import ModelGraph, kept_graphs, model_graph
from fxcore.graph.multiples import multiple_of
from fxcore.images.fitting import fitted
from fxcore.images.preprocessing import Preprocessing
from fxcore.models.entry import ModelEntry
from fxcore.passes.registry import get_transform
from service.engine.memory.transforms import steps
from service.schemas.image_size import MAX_PATCHES
from service.schemas.specs import ExtractorSpec


def graph_for(spec: ExtractorSpec, entry: ModelEntry, weights: str) -> ModelGraph:
    """Return the graph whose nodes ``spec`` names, for the image size that it requests.

    It may trace the model, so do not call it on the event loop.

    Raises:
        NotTraceable: the model cannot be traced.
        UnknownTransform, BadParameter: a transform of the spec is invalid.
        BadTensor: the model accepts only the input size of its weights, or that size has too many patches.
        Unsupported: a transform is not supported here; or see :func:`preprocessing_for`.
    """
    wanted = steps(spec)  # rejects invalid transforms before anything is traced
    graph = model_graph(entry, weights)
    adding = dict.fromkeys(step["name"] for step in wanted if get_transform(step["name"]).adds_nodes)
    if adding:  # so that the spec can name the nodes that they add
        graph = graph.with_nodes_of(*adding)
    if spec.image_size is None and spec.fit == "crop":
        return graph
    size = preprocessing_for(spec, entry, weights).nominal_size()
    if entry.one_size and math.prod(size) > MAX_PATCHES * (side := multiple_of(model_graph(entry, weights))) ** 2:
        raise BadTensor(
            f"image_size: {size[0]} x {size[1]} is more than the {MAX_PATCHES:,} squares of {side} pixels that are "
            f"allowed for {entry.name}"
        )
    try:
        return graph.at(*size)
    except BadTensor as error:
        multiple = multiple_of(graph)
        helps = any(side % multiple for side in size) and not any(side % multiple for side in graph.input_size)
        hint = f"; choose multiples of {multiple}" if helps else ""
        raise BadTensor(f"image_size: {error.detail}{hint}", **error.extra) from error


def preprocessing_for(spec: ExtractorSpec, entry: ModelEntry, weights: str) -> Preprocessing:
    """Return the preprocessing for the image size that ``spec`` requests. Do not call it on the event loop.

    Raises:
        BadTensor: ``image_size`` and ``fit`` cannot be combined.
        Unsupported: this model supports only the resizing of its weights.
    """
    if spec.fit == "crop":
        return entry.preprocessing(weights, spec.image_size)
    multiple = multiple_of(model_graph(entry, weights)) if spec.fit == "native" else 1
    return fitted(entry.preprocessing(weights), spec.fit, spec.image_size, multiple)


def graph_bytes(held: Iterable[ModelGraph]) -> int:
    """Return the bytes of the graphs ``held`` and of those cached by fxcore, each counted once."""
    graphs = {id(graph): graph for kept in kept_graphs() for graph in (kept, *kept.derived)}
    graphs.update((id(graph), graph) for graph in held)
    return sum(graph.bytes for graph in graphs.values())


def idle_graphs(held: Iterable[ModelGraph]) -> list[ModelGraph]:
    """Return the cached graphs that are not in ``held``, the least recently used first."""
    used = {id(graph.traced_modules) for graph in held}
    return [graph for graph in kept_graphs() if id(graph.traced_modules) not in used]
