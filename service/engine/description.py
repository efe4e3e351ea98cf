"""The description of an extractor: everything that determines its values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from fxcore.backends import why_bfloat16_is_slow
from fxcore.images.decoding import Decoder
from fxcore.images.preprocessing import Preprocessing
from fxcore.models.entry import ModelEntry
from fxcore.tensors import TensorSpec
from service.schemas.specs import ExtractorSpec

ModelKey = tuple[str, str, str]
"""Model, canonical weights and precision: extractors with the same key share their loaded weights."""

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.float32}
"""The dtype of the weights and the inputs; int8 arithmetic is inside its backend."""


@dataclass(frozen=True, eq=False)
class Description:
    """Everything that determines what an extractor computes. Any thread may read it.

    Attributes:
        id: hash of everything that determines its values.
        spec: the spec in the request that created it.
        entry: its model.
        weights: canonical name of the weights.
        device: the device it runs on: ``cpu``, ``cuda:0``.
        inputs: names, layouts and channels of its inputs; the sizes are the usual ones.
        fingerprint: fingerprint of the model's graph.
        return_nodes: key → resolved node, in the order requested.
        preprocessing: turns images into its inputs.
        decoder: decodes images into rows of its input.
        edits: for a variant of the extractor, the nodes whose values its requests edit.
    """

    id: str
    spec: ExtractorSpec
    entry: ModelEntry
    weights: str
    device: str
    inputs: tuple[TensorSpec, ...]
    fingerprint: str
    return_nodes: dict[str, str]
    preprocessing: Preprocessing
    decoder: Decoder
    edits: tuple[str, ...] = ()

    @cached_property
    def model_key(self) -> ModelKey:
        return self.entry.name, self.weights, "float32" if self.spec.precision == "int8" else self.spec.precision

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of floating inputs."""
        return precision_dtype(self.entry, self.spec.precision)

    @property
    def of(self) -> str:
        """A phrase for the model or the part of the model that it runs."""
        return f"this part of {self.spec.model}" if self.spec.inputs else self.spec.model

    @cached_property
    def begins_at(self) -> dict[str, str]:
        """Its inputs, name → node, if it begins at inner nodes; otherwise empty."""
        return {spec.name: spec.node for spec in self.inputs if spec.node is not None}

    @cached_property
    def takes_images(self) -> bool:
        """Whether it takes single images."""
        return not self.begins_at and self.preprocessing.takes_images and len(self.inputs) == 1

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The origin of its values, as a flat dict of text for formats that support only that."""
        return {
            "model": self.spec.model,
            "extractor": self.id,
            "weights": self.weights,
            "nodes": nodes_text(self.return_nodes),
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def note(self) -> str | None:
        """A note to clients about its speed on this machine, if there is one."""
        return why_bfloat16_is_slow(torch.device(self.device)) if self.dtype == torch.bfloat16 else None

    def usual_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of one row of each input, for the usual image size."""
        size = self.preprocessing.nominal_size()
        return [spec.usual or (*(d or 1 for d in spec.shape[1:-2]), *size) for spec in self.inputs]

    @cached_property
    def spec_bytes(self) -> int:
        """Length of its spec as JSON."""
        return len(self.spec.model_dump_json())


def nodes_text(nodes: Mapping[str, str]) -> str:
    """Return ``nodes`` of a response, key → node, as the JSON text of its metadata."""
    return json.dumps(nodes, ensure_ascii=False, separators=(",", ":"))


def precision_dtype(entry: ModelEntry, precision: str) -> torch.dtype:
    """Return the dtype of a model's weights and inputs: the model's own unless another precision is requested."""
    return entry.dtype if precision == "float32" else PRECISIONS[precision]
