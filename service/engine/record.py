"""What the engine knows of one extractor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from fxcore.backends import Lowered
from fxcore.errors import FxError
from fxcore.extractor import Extractor, OutputInfo
from fxcore.graph.model_graph import ModelGraph
from fxcore.images.decoding import Decoder
from fxcore.images.nvjpeg import JpegBatches
from fxcore.images.preprocessing import Preprocessing
from fxcore.models.entry import ModelEntry
from fxcore.tensors import TensorSpec
from service.byte_cache import ByteCache
from service.engine.candidate import Candidate
from service.engine.options import FeatureOptions
from service.engine.rows import ResponseSize, RowShape, RowSize
from service.engine.transformation import Transformed
from service.problems import Problem
from service.schemas.v1 import ExtractorSpec

State = Literal["building", "ready", "failed"]

ModelKey = tuple[str, str, str]
"""Model, canonical weights and precision: extractors with the same key share their loaded weights."""


MAX_RETRY_SECONDS = 60.0
"""Maximum time between two attempts to build an extractor whose build fails."""

SIZES_BYTES = 512 * 1024
"""Most bytes of the cached sizes of an extractor's rows, and as many again of its responses."""

OUTPUT_BYTES = 512
"""Bytes of the Python objects for the name, shape and dtype of one output."""


def retry_seconds(failures: int) -> float:
    """How long to wait before trying again what failed, after ``failures`` earlier failures in a row: 1 s, and twice as
    long each time, up to :data:`MAX_RETRY_SECONDS`."""
    return min(2.0 ** min(failures, 16), MAX_RETRY_SECONDS)


def _kept_sizes() -> ByteCache[Any, Any]:
    return ByteCache(SIZES_BYTES, lambda size: OUTPUT_BYTES * (1 + len(size.outputs)))


@dataclass(eq=False)
class ExtractorRecord:
    """One extractor, from the moment it is asked for until it is deleted. Only the event loop changes it.

    Attributes:
        id: hash of everything that decides the values it gives.
        spec: of the request that made it.
        name: the name last given to it.
        entry: its model.
        weights: canonical name of the weights.
        device: where it runs: ``cpu``, ``cuda:0``.
        inputs: names, layouts and channels of the model's inputs; the sizes are its usual ones.
        fingerprint: of the model's graph.
        held: the model's annotated graph, while the extractor is in memory.
        return_nodes: key → node, resolved, in the order asked for.
        preprocessing: turns images into its inputs.
        state: ``building``, ``ready`` or ``failed``.
        problem: why, when it failed; raise :attr:`failure` instead.
        failures: how many builds in a row have failed.
        retry_at: when a failed build may be tried again, on the clock of ``time.monotonic()``.
        extractor: the built module; None until then and after eviction. The next request builds it again; ``outputs``
            and the rest stay.
        outputs: what it returns, in the order asked for; known once it was built.
        backend: the one that computes it.
        checks: how far the backend's values are from the model's own in float32; None until it was built.
        check: the task that measures ``checks`` for eager, once it is built.
        pinned: preloaded, never evicted.
        build: the task that builds it, while it runs.
        run: computes a batch; called with the model's inputs in order, on the device. Another backend takes over by
            replacing it; the worker reads it once a batch.
        users: the requests and builds that keep it in memory now; see :meth:`in_use`.
        last_used: when the last of these ended, on the clock of ``time.monotonic()``.
        row_sizes: the sizes of a row by its shape; see :mod:`service.engine.requests.sizes`.
        response_sizes: the sizes of a row of the response by shape and options.
        images: how many images it has answered.
        upgrade: the search for a faster backend, once started.
        transformed: what its transforms did, if it has any.
        token: of its entry in the store; None if it is in no store.
        adopted: whether another process made it and this one read it from the store.
        gone: whether it was deleted or unloaded: its requests in flight finish, and nothing new is started for it.
    """

    id: str
    spec: ExtractorSpec
    name: str | None
    entry: ModelEntry
    weights: str
    device: str
    inputs: tuple[TensorSpec, ...]
    fingerprint: str
    held: ModelGraph | None
    return_nodes: dict[str, str]
    preprocessing: Preprocessing
    state: State = "building"
    problem: FxError | Problem | None = None
    failures: int = 0
    retry_at: float = 0.0
    extractor: Extractor | None = None
    outputs: list[OutputInfo] = field(default_factory=list)
    backend: str = "eager"
    checks: dict[str, Any] | None = None
    pinned: bool = False
    build: asyncio.Task[None] | None = None
    check: asyncio.Task[Candidate] | None = None
    run: Lowered | None = None
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)
    row_sizes: ByteCache[RowShape, RowSize] = field(default_factory=_kept_sizes)
    response_sizes: ByteCache[tuple[RowShape, FeatureOptions], ResponseSize] = field(default_factory=_kept_sizes)
    images: int = 0
    upgrade: asyncio.Task[None] | None = None
    transformed: Transformed | None = None
    token: str | None = None
    adopted: bool = False
    gone: bool = False

    @property
    def model_key(self) -> ModelKey:
        return self.entry.name, self.weights, "float32" if self.spec.precision == "int8" else self.spec.precision

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of floating inputs."""
        return precision_dtype(self.entry, self.spec.precision)

    def usual_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one row of each input, for the usual image size."""
        size = self.preprocessing.nominal_size()
        return [(*(d or 1 for d in spec.shape[1:-2]), *size) for spec in self.inputs]

    @cached_property
    def decoder(self) -> Decoder:
        """Turns encoded images into rows of its input."""
        return Decoder(self.preprocessing)

    @cached_property
    def jpeg_batches(self) -> JpegBatches | None:
        """Decodes several JPEG files of a request together on the device; None if the CPU decodes."""
        device = torch.device(self.device)
        return JpegBatches(self.decoder, device) if device.type == "cuda" and self.decoder.scales else None

    @property
    def active(self) -> bool:
        """Whether it is being built, or has requests in flight."""
        return self.users > 0 or self.build is not None

    @property
    def pinned_or_active(self) -> bool:
        """Whether it must stay in memory now."""
        return self.pinned or self.active

    def fail(self, problem: FxError | Problem) -> None:
        """Record that its build failed; it may be tried again after :func:`retry_seconds`."""
        self.state, self.problem = "failed", problem
        self.retry_at = time.monotonic() + retry_seconds(self.failures)
        self.failures += 1

    @property
    def failure(self) -> FxError | Problem | None:
        """A copy of ``problem`` to raise; one that may pass says when the build may be tried again."""
        failure = copy(self.problem)
        if isinstance(failure, Problem) and failure.retry_after is not None:
            failure.retry_after = max(0.0, self.retry_at - time.monotonic())
        return failure

    def storages(self) -> dict[int, int]:
        """Bytes that its backend holds beside the model's weights, by address."""
        return self.run.storages() if self.run is not None else {}

    @property
    def description_bytes(self) -> int:
        """About the bytes of an evicted record: its spec, nodes, outputs and problem."""
        problem = 0 if self.problem is None else 4 * len(self.problem.detail)
        return _RECORD_BYTES + 4 * self._spec_bytes + 2 * OUTPUT_BYTES * len(self.outputs) + problem

    def forget_sizes(self) -> None:
        """Clear the cached sizes of its rows."""
        self.row_sizes.clear()
        self.response_sizes.clear()

    @cached_property
    def _spec_bytes(self) -> int:
        return len(self.spec.model_dump_json())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it in memory inside a ``with`` block."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self.last_used = time.monotonic()


_RECORD_BYTES = 8 * 1024
"""A record without anything in it, its preprocessing and its decoder."""


def precision_dtype(entry: ModelEntry, precision: str) -> torch.dtype:
    """The dtype of a model's weights and inputs: that of its builder where no other precision is asked for."""
    return entry.dtype if precision == "float32" else PRECISIONS[precision]


PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.float32}
"""The dtype of the weights and the inputs; int8 arithmetic is inside its backend."""
