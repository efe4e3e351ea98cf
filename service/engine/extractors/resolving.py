"""Resolving a spec: finding its model, weights and nodes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence

import torch

from fxcore.errors import BadTensor, DuplicateKey
from fxcore.graph.model_part import ModelPart
from fxcore.graph.nodes import is_group
from fxcore.images.decoding import Decoder
from fxcore.models.catalog import get_model
from fxcore.tensors import TensorSpec
from service.engine.backends.choice import check_backend
from service.engine.description import Description
from service.engine.memory.graphs import graph_for, preprocessing_for
from service.engine.memory.transforms import prepared, steps
from service.engine.models.served import require_served
from service.engine.options import VALID_BOX
from service.problems import TooManyNodes
from service.schemas.v1 import ExtractorSpec


def resolve(spec: ExtractorSpec, device: torch.device, allowed: Collection[str] | None, max_nodes: int) -> Description:
    """Describe the extractor that ``spec`` asks for. Not for the event loop: it may trace the model.

    Args:
        spec: names its model and nodes.
        device: where it will run.
        allowed: the only models served; None for all.
        max_nodes: maximum nodes that names with ``*`` stand for.

    Raises:
        TooManyNodes: they stand for more.
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
            f"the names stand for {len(return_nodes)} nodes, and groups may stand for {max_nodes} at most "
            "(FXSERVE_MAX_NODES); name fewer",
            count=len(return_nodes),
            limit=max_nodes,
        )
    if spec.fit == "pad" and VALID_BOX in return_nodes:
        detail = f"fit=pad adds an output {VALID_BOX!r}: give the node of that name another key"
        raise DuplicateKey(detail, key=VALID_BOX)
    if spec.inputs is not None and spec.fit != "crop":
        raise BadTensor(f"fit={spec.fit} is for images, and an extractor that begins at inner nodes takes none")
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
    """Return the id of the extractor that ``spec`` describes, with the full names of its weights and nodes."""
    decisive = {
        "model": spec.model,
        "weights": weights,
        "return_nodes": list(return_nodes.items()),
        "precision": spec.precision,
        "backend": spec.backend,
        "transforms": steps(spec),
        "image_size": spec.image_size,
        # Left out where it is the default, as in specs older than this key: their ids stay.
        **({} if spec.fit == "crop" else {"fit": spec.fit}),
    }
    begins_at = {one.name: one.node for one in inputs if one.node is not None}
    if begins_at:  # left out otherwise, as in specs older than this key: their ids stay
        decisive["inputs"] = list(begins_at.items())
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
