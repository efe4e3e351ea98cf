"""Objects that the routes share: the engine, the settings, and cached answers that never change."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import quote

from fastapi import Depends, Request
from starlette.types import Scope

from fxcore.models.catalog import Source, get_model, list_models
from fxcore.models.entry import ModelEntry
from fxcore.models.timm_models import PREFIX, imported
from service.byte_cache import ByteCache
from service.engine import Engine, ExtractorRecord
from service.engine.registry.served import is_served, may_serve, require_served
from service.http.lookups import Lookups
from service.observability.metrics import STAGE_TIMES, STAGES, Metrics
from service.schemas.v2 import TensorMetadata
from service.settings import Settings

if TYPE_CHECKING:
    from service.observability.tracing import Traces

Result = TypeVar("Result")

EXPORT_SECONDS = 600.0
"""Shortest time limit of an export, which includes waiting for others."""


KEPT_BYTES = 64 * 1024**2
"""Most bytes of cached answers of one kind."""

KeptAnswers = ByteCache[tuple[object, ...], bytes]


def _kept_answers() -> KeptAnswers:
    return ByteCache(KEPT_BYTES, len)


@dataclass(frozen=True)
class OwnTensors:
    """The tensors of ``/v2`` under a model's name: its inputs, and the nodes answered if a request names none."""

    inputs: list[TensorMetadata]
    nodes: list[str]


@dataclass
class State:
    """One service's shared objects, at ``app.state.fxserve``."""

    settings: Settings
    engine: Engine
    metrics: Metrics
    traces: Traces | None = None
    nodes: KeptAnswers = field(default_factory=_kept_answers)
    graphs: KeptAnswers = field(default_factory=_kept_answers)
    metadata: KeptAnswers = field(default_factory=_kept_answers)
    # By model and structure, of which there are few.
    own_tensors: dict[tuple[str, str], OwnTensors] = field(default_factory=dict)
    # Two profiles at a time would disturb each other.
    profiling: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.lookups = Lookups(self.settings.request_timeout)
        # An export holds the weights a second time; one at a time.
        self.exports = Lookups(max(EXPORT_SECONDS, self.settings.request_timeout), at_once=1, most=4)

    def models(self, source: Source | None = None) -> list[ModelEntry]:
        """The models served here, without timm's."""
        return [entry for entry in list_models(source) if is_served(entry.name, self.settings.models)]

    async def timms(self) -> list[ModelEntry]:
        """The models of timm that are served here. The first call imports timm, which takes seconds, if any may be.

        Raises:
            Unsupported: timm is not installed.
        """
        if not may_serve(PREFIX, self.settings.models):
            return []
        return self.models("timm") if imported() else await self.in_thread(lambda: self.models("timm"))

    async def model(self, name: str) -> ModelEntry:
        """The model called ``name``.

        Raises:
            UnknownModel: there is none, or it is not served here.
            Unsupported: it is timm's, which is not installed.
        """
        waits = name.startswith(PREFIX) and not imported()
        entry = await self.in_thread(lambda: get_model(name)) if waits else get_model(name)
        require_served(name, self.settings.models)
        return entry

    def answer_headers(
        self, scope: Scope, record: ExtractorRecord, milliseconds: Mapping[str, float]
    ) -> dict[str, str]:
        """The headers of every answer with features; also records the stages' times in metrics and traces.

        Weights may have a file's name, in any script, and headers are ASCII: the name is percent-encoded.
        """
        scope[STAGE_TIMES] = milliseconds
        if self.traces is not None:
            self.traces.stages(milliseconds)
        return {
            "Server-Timing": ", ".join(f"{stage};dur={milliseconds.get(stage, 0.0):.3f}" for stage in STAGES),
            "X-Fxserve-Weights": _percent_encoded(record.weights),
        }

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run ``work``, which may trace a graph, in a thread of :attr:`lookups`.

        Raises:
            AdmissionFull, DeadlineExceeded: see :meth:`Lookups.place`.
        """
        async with self.lookups.place() as place:
            result = await place.run(work)
        self.engine.extractors.eviction.make_room()
        return result

    def start(self) -> None:
        """Start the threads of lookups and exports."""
        self.lookups.start()
        self.exports.start()

    def close(self) -> None:
        """Start no more lookups and exports."""
        self.lookups.close()
        self.exports.close()


@functools.cache  # of what is loaded here
def _percent_encoded(name: str) -> str:
    return quote(name, safe=":")


def state_of(request: Request) -> State:
    """The state of the application that answers ``request``."""
    state = request.app.state.fxserve
    assert isinstance(state, State)
    return state


async def get_state(request: Request) -> State:
    """:func:`state_of` as a dependency: async, since FastAPI would run a plain function in a thread.

    A dependency adds to FastAPI's time for each request, so the hottest routes call :func:`state_of`.
    """
    return state_of(request)


Shared = Annotated[State, Depends(get_state)]
