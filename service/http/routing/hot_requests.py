"""Requests of the hot routes, with the steps that these have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from service.codecs.requests import bodies, multipart
from service.codecs.responses import Parts, PartsResponse
from service.engine import Engine
from service.engine.description import Description
from service.engine.requests.admission.admission import Reservation
from service.http.deadline import Deadline
from service.http.scope import RESERVATION, caller_of, header, joined_header
from service.http.state import State
from service.observability.metrics import STAGE_TIMES, STAGES

Query = TypeVar("Query", bound=BaseModel)
Result = TypeVar("Result")

_INLINE_BYTES = 240 * 1024
"""Bytes up to which a response is written on the event loop: up to 16 K numbers, or the heads of 30 outputs, take less
than a millisecond, and a thread takes longer to get them."""


class HotRequest(Request, Generic[Query]):
    """A request of a hot route.

    Args:
        scope, receive, send: the ASGI request.
        query: its parsed query.
        timeout: the seconds that its client allows; None for the server's limit.

    Attributes:
        query: see the arguments.
        shared: the shared state of the application.
        engine: its engine.
        caller: the client.
        reservation: the bytes that it holds; those of its response are added.
        deadline: a context manager that cancels the request; its time begins when this object is made.
        kind: the media type of its body, once :meth:`check_body` was called.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, query: Query, timeout: float | None) -> None:
        super().__init__(scope, receive, send)
        self.query = query
        self.shared: State = self.app.state.fxserve
        self.engine: Engine = self.shared.engine
        self.caller = caller_of(scope)
        self.reservation: Reservation = scope[RESERVATION]
        limit = self.engine.settings.request_timeout
        self.deadline = Deadline(receive, limit if timeout is None else min(timeout, limit))
        self.kind = self._boundary = ""
        self._chunks: list[bytes] | None = None

    def check_body(self, taken: tuple[str, ...] = bodies.TAKEN) -> None:
        """Check, before the body is read, that its type is one of ``taken``, and that admission has room.

        Raises:
            UnsupportedMediaType: it has another type, or is compressed.
            AdmissionFull: there is no room.
        """
        encoding = joined_header(self.scope, b"content-encoding")
        self.kind, self._boundary = bodies.check(header(self.scope, b"content-type"), encoding, taken)
        self.engine.admission.check(self.reservation.client)

    async def read_body(self) -> None:
        """Receive the whole body, unless it has been received. Only then is a disconnect noticed.

        Raises:
            InvalidRequest: the form is malformed.
            ClientDisconnect: the client disconnected before it had sent everything.
        """
        if self._chunks is None:
            if self.kind == "multipart/form-data":
                self._chunks = await multipart.read(self.stream(), self._boundary)
            else:
                self._chunks = [chunk async for chunk in self.stream()]
            self.deadline.body_read()

    async def parse(self, read: Callable[..., Result], *args: object) -> Result:
        """Receive the body, and return ``read(chunks, *args)``. Call it once."""
        await self.read_body()
        chunks, self._chunks = self._chunks or [], []  # not needed once parsed
        if bodies.is_small(self.kind, chunks):
            return read(chunks, *args)
        return await self.engine.run_in_encoder(read, chunks, *args)

    async def encode(self, memory: int, function: Callable[..., Result], *args: object) -> Result:
        """Claim the ``memory`` bytes that ``function`` allocates, and write a response with it; in a thread if many."""
        if memory:
            self.reservation.claim(memory)
        if memory <= _INLINE_BYTES:
            return function(*args)
        return await self.engine.run_in_encoder(function, *args)

    def respond(
        self,
        description: Description,
        timings: Mapping[str, float],
        started: float,
        parts: Parts,
        media_type: str,
        headers: Mapping[str, str],
    ) -> PartsResponse:
        """Build the response, and record the stages' times in metrics and traces.

        The name of the weights is percent-encoded, because headers are ASCII and file names may not be.

        Args:
            description: the extractor.
            timings: milliseconds of the stages before encoding.
            started: when encoding started, on the clock of ``time.perf_counter()``.
            parts, media_type: the body and its type.
            headers: headers besides those of every response with features.
        """
        milliseconds = {**timings, "encode": (time.perf_counter() - started) * 1000}
        self.scope[STAGE_TIMES] = milliseconds
        if self.shared.traces is not None:
            self.shared.traces.stages(milliseconds)
        sent = {
            "Server-Timing": ", ".join(f"{stage};dur={milliseconds.get(stage, 0.0):.3f}" for stage in STAGES),
            "X-Fxserve-Weights": quote(description.weights, safe=":"),
            **headers,
        }
        if description.note is not None:
            sent["X-Fxserve-Note"] = description.note
        return PartsResponse(parts, media_type, sent)
