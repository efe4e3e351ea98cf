"""State shared by the routes: the engine, and cached responses that never change."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Request

from fxcore.models.catalog import Source, get_model, list_models
from fxcore.models.entry import ModelEntry
from fxcore.models.timm_models import PREFIX, imported, timm_models
from service.byte_cache import ByteCache
from service.engine import Engine, ExtractorRecord
from service.engine.models.served import is_served, may_serve, require_served
from service.engine.threads import in_pool
from service.http.lookups import Lookups
from service.http.scope import Caller
from service.http.top_images import TopImages
from service.schemas.specs import ExtractorSpec
from service.schemas.v2 import TensorMetadata

if TYPE_CHECKING:
    from service.observability.tracing import Traces

Result = TypeVar("Result")

EXPORT_SECONDS = 600.0
"""Minimum time limit of an export in seconds, including the wait for other exports."""


_DOCUMENT_BYTES = 192 * 1024**2
"""Maximum bytes of the cached response bodies."""

_CUTS_BYTES, _CUT_BYTES = 64 * 1024**2, 1024
"""Maximum bytes of :attr:`State.cuts`, and the approximate bytes of an entry without its value."""


@dataclass(frozen=True)
class OwnTensors:
    """Default tensors of a model in ``/v2``: its inputs, and the nodes returned if a request names none."""

    inputs: list[TensorMetadata]
    nodes: list[str]


@dataclass
class State:
    """The shared objects of one service, at ``app.state.fxserve``."""

    engine: Engine
    traces: Traces | None = None
    # Bodies of lists of nodes, of graphs and of metadata.
    documents: ByteCache[tuple[object, ...], bytes] = field(default_factory=lambda: ByteCache(_DOCUMENT_BYTES, len))
    # The nodes where attributions begin, by model, weights, size, fit and requested nodes.
    cuts: ByteCache[tuple[str | None, ...], list[str]] = field(
        default_factory=lambda: ByteCache(_CUTS_BYTES, lambda names: _CUT_BYTES + sum(map(len, names)))
    )
    # By model and structure; there are few of them.
    own_tensors: dict[tuple[str, str], OwnTensors] = field(default_factory=dict)
    # Concurrent profiles would distort each other.
    profiling: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        settings, threads = self.engine.settings, self.engine.threads
        self.lookups = Lookups(settings.request_timeout, threads.lookups)
        self.listings = Lookups(settings.request_timeout, threads.listings)
        self.pictures = Lookups(settings.request_timeout, threads.pictures)
        self.exports = Lookups(max(EXPORT_SECONDS, settings.request_timeout), threads.exports, max_requests=4)
        self.top_images = (
            None
            if settings.statistics is None
            else TopImages(settings.statistics, settings.max_body_bytes, settings.max_pixels)
        )

    def models(self, source: Source | None = None) -> list[ModelEntry]:
        """List the models served, without timm's unless ``source`` is timm.

        The first call for timm's imports timm, which takes seconds.

        Raises:
            Unsupported: ``source`` is timm, and timm is not installed.
        """
        if source == "timm" and not may_serve(PREFIX, self.engine.settings.models):
            return []
        return [entry for entry in list_models(source) if is_served(entry.name, self.engine.settings.models)]

    async def model(self, caller: Caller, name: str) -> ModelEntry:
        """Look up a model.

        Raises:
            UnknownModel: it does not exist or is not served.
            NotTraceable: it is an operator's own and cannot be traced.
            Unsupported: it is timm's, and timm is not installed.
            AdmissionFull, DeadlineExceeded: see :meth:`in_thread`.
        """
        allowed = self.engine.settings.models

        def look_up() -> ModelEntry:
            require_served(name, allowed)
            return get_model(name)

        # timm is imported, or over a thousand names are searched for similar ones.
        slow = name.startswith(PREFIX) and not (imported() and name in timm_models() and is_served(name, allowed))
        return await self.in_thread(caller, look_up) if slow else look_up()

    async def trace(self, caller: Caller, work: Callable[[], Result]) -> Result:
        """Run a request's tracing in the builder threads, so that lookups do not delay inference.

        For a caller that may not build, tracing itself counts as a lookup and is limited like one.
        """
        if caller.may_build:
            return await in_pool(self.engine.threads.builders, work)
        return await self.in_thread(caller, work)

    async def extractor(self, caller: Caller, spec: ExtractorSpec) -> ExtractorRecord:
        """Look up the extractor of a spec, or create it if ``caller`` is allowed to.

        Raises:
            Forbidden: it does not exist and ``caller`` may not create it.
            AdmissionFull, DeadlineExceeded: see :meth:`in_thread`.
            FxError: see :meth:`service.engine.extractors.extractors.Extractors.get`.
        """
        trace = functools.partial(self.trace, caller)
        record, _ = await self.engine.extractors.get(spec, build=caller.may_build, trace_in=trace)
        return record

    async def document(self, caller: Caller, key: tuple[object, ...], write: Callable[[], bytes]) -> bytes:
        """Return a cached response body, or write it in a thread; see :meth:`in_thread`."""
        content = self.documents.get(key)
        if content is None:
            content = await self.in_thread(caller, write)
            self.documents.put(key, content)
        return content

    async def in_thread(self, caller: Caller, work: Callable[[], Result]) -> Result:
        """Run ``work``, which may trace a model, in a thread of :attr:`lookups`.

        Raises:
            AdmissionFull, DeadlineExceeded: see :meth:`Lookups.place`.
        """
        async with self.lookups.place(caller) as run:
            result = await run(work)
        self.engine.eviction.make_room()
        return result


async def get_state(request: Request) -> State:
    """Return the shared state. It is async, because FastAPI runs plain functions in a thread."""
    state = request.app.state.fxserve
    assert isinstance(state, State)
    return state


Shared = Annotated[State, Depends(get_state)]
