"""The graphs that extractors are pruned from, and which of fxcore's cached graphs may be evicted."""

from __future__ import annotations

from collections.abc import Iterable

from fxcore.errors import BadTensor
from fxcore.graph.model_graph import ModelGraph, kept_graphs, model_graph
from fxcore.graph.multiples import multiple_of
from fxcore.images.fitting import fitted
from fxcore.images.preprocessing import Preprocessing
from fxcore.models.entry import ModelEntry
from service.engine.memory.transforms import steps, with_their_nodes
from service.schemas.specs import ExtractorSpec


def named_graph(spec: ExtractorSpec, entry: ModelEntry, weights: str) -> ModelGraph:
    """Return the graph that ``spec`` names nodes of. Not for the event loop: the model may have to be traced.

    Raises:
        NotTraceable: see there.
        UnknownTransform, BadParameter, Unsupported: of the spec's transforms.
    """
    wanted = steps(spec)  # refuses wrong transforms before anything is traced
    return with_their_nodes(model_graph(entry, weights), wanted)


def graph_for(spec: ExtractorSpec, entry: ModelEntry, weights: str) -> ModelGraph:
    """Return the same graph for images of the size that ``spec`` asks for.

    Raises:
        BadTensor: the model does not take inputs of another size than its weights were made for.
        Unsupported: see :func:`preprocessing_for`.
    """
    graph = named_graph(spec, entry, weights)
    if spec.image_size is None and spec.fit == "crop":
        return graph
    size = preprocessing_for(spec, entry, weights).nominal_size()
    try:
        return graph.at(*size)
    except BadTensor as error:
        raise BadTensor(f"image_size: {error.detail}", **error.extra) from error


def preprocessing_for(spec: ExtractorSpec, entry: ModelEntry, weights: str) -> Preprocessing:
    """Return the preprocessing that brings images to the size that ``spec`` asks for. Not for the event loop.

    Raises:
        BadTensor: ``image_size`` and ``fit`` do not go together.
        Unsupported: images of this model come to their size in no other way than their weights'.
    """
    if spec.fit == "crop":
        return entry.preprocessing(weights, spec.image_size)
    multiple = multiple_of(model_graph(entry, weights)) if spec.fit == "native" else 1
    return fitted(entry.preprocessing(weights), spec.fit, spec.image_size, multiple)


def graph_bytes(held: Iterable[ModelGraph]) -> int:
    """Return bytes of the graphs ``held`` and of those that fxcore caches, each counted once."""
    graphs = {id(graph): graph for kept in kept_graphs() for graph in (kept, *kept.derived)}
    graphs.update((id(graph), graph) for graph in held)
    return sum(graph.bytes for graph in graphs.values())


def idle_graphs(held: Iterable[ModelGraph]) -> list[ModelGraph]:
    """Return the cached graphs that are not ``held``, the least recently used first."""
    used = {id(graph.traced_modules) for graph in held}
    return [graph for graph in kept_graphs() if id(graph.traced_modules) not in used]
