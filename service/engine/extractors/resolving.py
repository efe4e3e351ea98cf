"""Resolution of a spec: its model, weights and nodes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from weakref import WeakValueDictionary

import torch

from fxcore.errors import BadTensor, DuplicateKey
from fxcore.graph.model_graph import ModelGraph, model_graph
from fxcore.graph.model_part import ModelPart
from fxcore.graph.naming import is_group
from fxcore.graph.node_info import is_extractable
from fxcore.images.decoding import Decoder
from fxcore.memory import LIVE_ACTIVATIONS
from fxcore.models.catalog import get_model
from fxcore.passes.base import CannotTransform
from fxcore.passes.registry import get_transform
from fxcore.tensors import TensorSpec, returned_dtype
from service.engine.backends.choice import check_backend
from service.engine.description import Description, precision_dtype
from service.engine.lifecycle.records import Records
from service.engine.memory.graphs import graph_for, preprocessing_for
from service.engine.memory.transforms import prepared, steps
from service.engine.models.served import is_served, require_served
from service.engine.options import VALID_BOX
from service.engine.rows.shapes import ABOUT_USUAL, LARGEST_ROW
from service.engine.threads import RunInThread, in_pool
from service.problems import TooManyNodes
from service.schemas.specs import ExtractorSpec, model_of_text, spec_of_text
from service.settings import Settings

_REMEMBERED_SPECS = 4096


class Resolver:
    """Describes the extractors of specs. For one event loop.

    Args:
        records: the extractors known here, which are not resolved again.
        device: where extractors run.
        pool: the builder threads.
        settings: the served models and the limits.
    """

    def __init__(self, records: Records, device: torch.device, pool: Executor, settings: Settings) -> None:
        self._records = records
        self._pool = pool
        self._device = device
        self._settings = settings
        # Cache: the one-step route resolves the same few specs again and again.
        self._ids: OrderedDict[bytes, str] = OrderedDict()
        self._tracing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def serves(self, model: str) -> bool:
        """Return whether a model of that name may be served here."""
        return is_served(model, self._settings.models)

    async def describe(self, spec: ExtractorSpec, trace_in: RunInThread | None = None) -> Description:
        """Return the description of the extractor that ``spec`` requests.

        Args:
            spec: names its model and nodes.
            trace_in: runs the resolving, which may trace the model, in a thread; by default one of the builder threads.

        Raises:
            FxError: see :func:`resolve`.
        """
        key = hashlib.sha256(spec.model_dump_json(exclude={"name"}).encode()).digest()
        known = self._records.get(self._ids.get(key, ""))
        if known is not None:
            description = known.description
        else:
            trace_in = trace_in or partial(in_pool, self._pool)
            # One at a time: all but the first find the graph already traced.
            async with self._tracing.setdefault((spec.model, spec.weights), asyncio.Lock()):
                description = await trace_in(lambda: resolve(spec, self._device, self._settings))
            self._ids[key] = description.id
        self._ids.move_to_end(key)
        if len(self._ids) > _REMEMBERED_SPECS:
            self._ids.popitem(last=False)
        return description


def resolve(spec: ExtractorSpec, device: torch.device, settings: Settings) -> Description:
    """Return the description of the extractor that ``spec`` requests.

    It may trace the model, so do not call it on the event loop.

    Args:
        spec: names its model and nodes.
        device: where it will run.
        settings: the served models and the limits.

    Raises:
        TooManyNodes: names with ``*`` expand to more nodes than allowed.
        BadTensor: one image of the spec's size needs too much memory.
        FxError: the spec names something that does not exist, or is not served.
    """
    require_served(spec.model, settings.models)
    entry = get_model(spec.model)
    weights = entry.canonical_weights(spec.weights)
    check_backend(spec, device, entry, weights)
    graph = graph_for(spec, entry, weights)
    return_nodes = graph.resolve(spec.return_nodes)
    if len(return_nodes) > settings.max_nodes and any(map(is_group, spec.return_nodes)):
        raise TooManyNodes(
            f"the names stand for {len(return_nodes)} nodes, and groups may stand for at most {settings.max_nodes} "
            "(FXSERVE_MAX_NODES); name fewer nodes",
            count=len(return_nodes),
            limit=settings.max_nodes,
        )
    if spec.image_size is not None and spec.inputs is None:  # rows of tensors are checked when they are sent
        usual = entry.preprocessing(weights).nominal_size()
        if math.prod(graph.input_size) > ABOUT_USUAL * math.prod(usual):
            _check_memory(graph, spec.precision, return_nodes, LARGEST_ROW * settings.max_batch_bytes)
    if spec.fit == "pad" and VALID_BOX in return_nodes:
        detail = f"fit=pad adds an output {VALID_BOX!r}: give the node of that name another key"
        raise DuplicateKey(detail, key=VALID_BOX)
    if spec.inputs is not None and spec.fit != "crop":
        raise BadTensor(f"fit={spec.fit} is for images, and an extractor that begins at inner nodes takes tensors")
    for step in steps(spec) if spec.inputs is not None else ():
        if get_transform(name := step["name"]).changes_input:
            detail = f"{name} is for images, and an extractor that begins at inner nodes takes tensors"
            raise CannotTransform(detail, transform=name)
    inputs = graph.inputs if spec.inputs is None else ModelPart(graph, graph.resolve(spec.inputs), return_nodes).inputs
    preprocessing = prepared(preprocessing_for(spec, entry, weights), steps(spec))
    return Description(
        id=extractor_id(spec, weights, return_nodes, inputs),
        spec=spec,
        entry=entry,
        weights=weights,
        device=str(device),
        inputs=inputs,
        fingerprint=graph.fingerprint,
        return_nodes=return_nodes,
        preprocessing=preprocessing,
        decoder=Decoder(preprocessing),
    )


def spec_to_preload(text: str) -> ExtractorSpec:
    """Parse ``MODEL[@WEIGHTS][:NODE[=KEY],…]`` into a spec, by default of the model's own nodes.

    It may trace the model, so do not call it on the event loop.

    Raises:
        FxError: there is no such model or weights.
        ValueError: the text has another form.
    """
    names = model_of_text(text)
    if names is None:
        return spec_of_text(text)
    model, weights = names
    entry = get_model(model)
    nodes = own_nodes(model_graph(entry, entry.structure(weights)))
    return ExtractorSpec(model=model, weights=weights, return_nodes=nodes)


def own_nodes(graph: ModelGraph) -> list[str]:
    """List the nodes that a model returns if none are named: its levels, or its last value if it has none."""
    if graph.levels:
        return list(graph.levels)
    return [name for name in graph.eval_nodes if name in graph.by_name and is_extractable(graph.by_name[name])][-1:]


def _check_memory(graph: ModelGraph, precision: str, return_nodes: Mapping[str, str], limit: int) -> None:
    """Check the activations of one image.

    Raises:
        BadTensor: they need more than ``limit`` bytes.
    """
    own, cast = graph.entry.dtype, precision_dtype(graph.entry, precision)
    shapes = [tuple(size or 1 for size in one.shape[1:]) for one in graph.inputs]
    values = graph.values_at(shapes, set(return_nodes.values())).values()
    largest = max(math.prod(dims) * returned_dtype(dtype, own, cast).itemsize for dims, dtype in values)
    if LIVE_ACTIVATIONS * largest > limit:
        shown = " x ".join(map(str, graph.input_size))
        raise BadTensor(
            f"image_size: an image of {shown} would need {LIVE_ACTIVATIONS * largest:,} bytes of memory, and it may "
            f"need {limit:,} ({LARGEST_ROW} x FXSERVE_MAX_BATCH_BYTES)"
        )


def extractor_id(spec: ExtractorSpec, weights: str, return_nodes: dict[str, str], inputs: Sequence[TensorSpec]) -> str:
    """Return the id of the extractor that ``spec`` describes, given the full names of its weights and nodes."""
    decisive = {
        "model": spec.model,
        "weights": weights,
        "return_nodes": list(return_nodes.items()),
        "precision": spec.precision,
        "backend": spec.backend,
        "transforms": steps(spec),
        "image_size": spec.image_size,
        # Omitted if it is the default, as in specs older than this key, whose ids must not change.
        **({} if spec.fit == "crop" else {"fit": spec.fit}),
    }
    begins_at = {one.name: one.node for one in inputs if one.node is not None}
    if begins_at:  # omitted otherwise, as in specs older than this key, whose ids must not change
        decisive["inputs"] = list(begins_at.items())
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
