"""Resolution of a spec: its model, weights and nodes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from functools import partial
from weakref import WeakValueDictionary

import torch

from fxcore.errors import BadTensor, DuplicateKey
from fxcore.graph.model_part import ModelPart
from fxcore.graph.nodes import is_group
from fxcore.images.decoding import Decoder
from fxcore.models.catalog import get_model
from fxcore.passes.base import CannotTransform
from fxcore.passes.registry import get_transform
from fxcore.tensors import TensorSpec
from service.engine.backends.choice import check_backend
from service.engine.description import Description
from service.engine.extractors.records import Records
from service.engine.memory.graphs import graph_for, preprocessing_for
from service.engine.memory.transforms import prepared, steps
from service.engine.models.served import require_served
from service.engine.options import VALID_BOX
from service.engine.record import ExtractorRecord
from service.engine.threads import RunInThread, in_pool
from service.problems import TooManyNodes
from service.schemas.specs import ExtractorSpec

_REMEMBERED_SPECS = 4096


class Resolver:
    """Finds or creates the record of a spec. For one event loop.

    Args:
        records: the extractors known here.
        device: where extractors run.
        pool: the builder threads.
        allowed: names and patterns of the served models; None for all.
        max_nodes: maximum number of nodes that name groups may expand to.
    """

    def __init__(
        self, records: Records, device: torch.device, pool: Executor, allowed: Collection[str] | None, max_nodes: int
    ) -> None:
        self._records = records
        self._pool = pool
        self._served = device, None if allowed is None else frozenset(allowed), max_nodes
        # Cache: the one-step route resolves the same few specs again and again.
        self._ids: OrderedDict[bytes, str] = OrderedDict()
        self._tracing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def record(self, spec: ExtractorSpec, trace_in: RunInThread | None = None) -> ExtractorRecord:
        """Return the known record of ``spec``, or a new one.

        Args:
            spec: names its model and nodes.
            trace_in: runs the resolving, which may trace the model, in a thread; by default one of the builder threads.

        Raises:
            FxError: see :func:`resolve`.
        """
        key = hashlib.sha256(spec.model_dump_json(exclude={"name"}).encode()).digest()
        record = self._records.get(self._ids.get(key, ""))
        if record is None:
            description = await self._resolve(spec, trace_in)
            record = self._records.get(description.id) or ExtractorRecord(description)
            self._ids[key] = record.id
            if len(self._ids) > _REMEMBERED_SPECS:
                self._ids.popitem(last=False)
        return record

    async def _resolve(self, spec: ExtractorSpec, trace_in: RunInThread | None) -> Description:
        trace_in = trace_in or partial(in_pool, self._pool)
        # One at a time: all but the first find the graph already traced.
        async with self._tracing.setdefault((spec.model, spec.weights), asyncio.Lock()):
            return await trace_in(lambda: resolve(spec, *self._served))


def resolve(spec: ExtractorSpec, device: torch.device, allowed: Collection[str] | None, max_nodes: int) -> Description:
    """Return the description of the extractor that ``spec`` requests.

    It may trace the model, so do not call it on the event loop.

    Args:
        spec: names its model and nodes.
        device: where it will run.
        allowed: names and patterns of the served models; None for all.
        max_nodes: maximum number of nodes that names with ``*`` may expand to.

    Raises:
        TooManyNodes: they expand to more.
        FxError: the spec names something that does not exist, or is not served.
    """
    require_served(spec.model, allowed)
    entry = get_model(spec.model)
    weights = entry.canonical_weights(spec.weights)
    check_backend(spec, device, entry, weights)
    graph = graph_for(spec, entry, weights)
    return_nodes = graph.resolve(spec.return_nodes)
    if len(return_nodes) > max_nodes and any(map(is_group, spec.return_nodes)):
        raise TooManyNodes(
            f"the names stand for {len(return_nodes)} nodes, and groups may stand for at most {max_nodes} "
            "(FXSERVE_MAX_NODES); name fewer nodes",
            count=len(return_nodes),
            limit=max_nodes,
        )
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


def extractor_id(
    spec: ExtractorSpec, weights: str, return_nodes: dict[str, str], inputs: Sequence[TensorSpec] = ()
) -> str:
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
