"""The ids of extractors."""

from __future__ import annotations

import hashlib
import json

from service.engine.registry.transforms import steps
from service.schemas.v1 import ExtractorSpec


def extractor_id(spec: ExtractorSpec, weights: str, return_nodes: dict[str, str]) -> str:
    """The id of what ``spec`` asks for, once its weights and nodes have their full names."""
    decisive = {
        "model": spec.model,
        "weights": weights,
        "return_nodes": list(return_nodes.items()),
        "precision": spec.precision,
        "backend": spec.backend,
        "transforms": steps(spec),
        "image_size": spec.image_size,
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
