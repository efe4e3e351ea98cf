"""Middleware for every request: its id, metrics, limits on its body, and a response even after a bug.

Plain ASGI, since ``BaseHTTPMiddleware`` hides disconnects from the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fxcore.errors import FxError
from service.engine.errors import EngineError, is_shortage, shortage
from service.engine.requests.admission import Admission, Reservation
from service.http.clients import CLIENT
from service.http.headers import header
from service.http.problem_responses import error_response, internal_response
from service.http.reservations import set_reservation
from service.observability import logs
from service.observability.metrics import Metrics
from service.schemas.problems import Refusal

if TYPE_CHECKING:
    from service.observability.tracing import Traces

log = logging.getLogger("fxserve")
access = logging.getLogger("fxserve.access")

REQUEST_ID_LENGTH = 128
REFUSED = "fxserve.refused"
"""Key in the scope of a request answered 429: its ``Retry-After`` in seconds."""

_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")

# Closing a connection with unread bytes resets it, and the client may lose the response (RFC 9112, 9.6). So the rest of
# a refused body is read and discarded, within these limits of time, pause and size.
LINGER_SECONDS, LINGER_PAUSE = 5.0, 1.0
LINGER_BYTES = 16 * 1024**2

MIN_BYTES_PER_SECOND = 64 * 1024
"""Minimum rate of a body, averaged: slower clients hold memory that others could use."""

MAX_OTHER_BYTES = 2 * 1024**2
"""Maximum body without images: twice the largest possible spec. Some of these are parsed on the event loop."""

_WITH_IMAGES = ("/features", "/infer", "/embeddings")

# JSON and images need no scripts or resources; SVG drawings have inline styles.
STRICT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def request_id(sent: str | None) -> str:
    """Return the request id that was sent, without characters that could forge log lines, or a new one."""
    return _NOT_IN_REQUEST_ID.sub("", sent or "")[:REQUEST_ID_LENGTH] or f"{random.getrandbits(128):032x}"


class RequestContext:
    """The outermost middleware: adds the request's id, metrics, log line and span, and answers unhandled exceptions.

    Args:
        app: the next middleware.
        metrics: where requests are counted.
        policies: Content-Security-Policy of pages by path; other paths get a strict one.
        traces: where spans are created, if enabled.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, policies: Mapping[str, str] | None = None, traces: Traces | None = None
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.traces = traces
        self._pages = {path: _security_headers(policy) for path, policy in (policies or {}).items()}
        self._others = _security_headers(STRICT_POLICY)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["request_id"] = request_id(header(scope, b"x-request-id"))
        entered = logs.request_id.set(scope["request_id"])
        try:
            if self.traces is None:
                await self._respond(scope, receive, send)
                return
            with self.traces.request(scope) as span:
                status = await self._respond(scope, receive, send)
                self.traces.responded(span, scope, status)
        finally:
            logs.request_id.reset(entered)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer a request; returns the status."""
        started = time.perf_counter()
        status = 0
        own_id = scope["request_id"]

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 429:
                    scope[REFUSED] = float(dict(message["headers"]).get(b"retry-after", 1))
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", own_id.encode("ascii")),
                    *self._pages.get(scope["path"], self._others),
                ]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = status or 499  # nginx's status for a client that closed the connection, for the metrics
        except Exception as error:
            log.exception("request %s: %s %r failed", own_id, scope["method"], scope["path"])
            if status:
                raise  # the response has started, so the connection is closed
            path = scope["path"]
            response = error_response(path, shortage(error)) if is_shortage(error) else internal_response(path)
            await response(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            self.metrics.observe(scope, status, seconds)
            if access.isEnabledFor(logging.INFO):
                _log_response(scope, status, seconds)
        return status


def _log_response(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_ms": round(seconds * 1000, 3),
        "client": client[0] if client else None,
    }
    access.info("%(method)s %(path)s %(status)s %(duration_ms)s ms", fields, extra={"fields": fields})


def _security_headers(policy: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-content-type-options", b"nosniff"),
        (b"content-security-policy", policy.encode("ascii")),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
    ]


class HeadAsGet:
    """Middleware that answers HEAD as GET; the server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}  # a copy, since the server goes by the method in its own scope
        try:
            await self.app(as_get, receive, send)
        finally:
            if "route" in as_get:
                scope["route"] = as_get["route"]  # for metrics and traces


class BodyLimit:
    """Middleware that limits request bodies in size, time and total memory.

    A body that is too large is refused by its Content-Length before it is read, a chunked one while it arrives. Bytes
    are reserved in admission from their arrival until the response is sent, so that clients that stall take no more
    memory than admission allows.

    Args:
        app: the next middleware.
        limit: maximum bytes of a body with images; others have a smaller limit.
        timeout: seconds that the server waits for a body. Each 64 KiB received extend the remaining time by a second,
            up to ``timeout``.
        admission: where the bytes are reserved.
    """

    def __init__(self, app: ASGIApp, limit: int, timeout: float, admission: Admission) -> None:
        self.app = app
        self.limit = limit
        self.timeout = timeout
        self.admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.limit if scope["path"].endswith(_WITH_IMAGES) else min(self.limit, MAX_OTHER_BYTES)
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            await _refuse(_too_large(limit), scope, receive, send)
            return
        if scope["method"] in ("GET", "HEAD"):  # no route reads a body, so it stays in the socket
            await self.app(scope, receive, send)
            return
        with self.admission.reserve(CLIENT.get()) as reservation:
            set_reservation(scope, reservation)
            body = _Body(limit, self.timeout, reservation, receive, send)
            with contextlib.suppress(_Refused):
                await self.app(scope, body.receive, body.send)
        if body.refusal is not None and not body.responded:  # after the reservation is released: this may take long
            await _refuse(body.refusal, scope, receive, send)


def _too_large(limit: int) -> Refusal:
    return Refusal("body-too-large", f"the body is larger than the limit of {limit:,} bytes", limit=limit)


class _Body:
    """A body as it arrives. Once it is refused, the route's response is dropped."""

    def __init__(self, limit: int, timeout: float, reservation: Reservation, receive: Receive, send: Send) -> None:
        self.refusal: Refusal | FxError | None = None
        self.responded = False
        self._limit = limit
        self._timeout = timeout
        self._reservation = reservation
        self._receive = receive
        self._send = send
        self._received = 0
        self._time_left = timeout
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:  # further calls wait for the disconnect
            return await self._receive()
        if self.refusal is not None:
            raise _Refused
        message = await self._receive_in_time()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            self._received += size
            if self._received > self._limit:
                self._refuse(_too_large(self._limit))
            try:
                self._reservation.claim(size)
            except EngineError as full:
                self._refuse(full)
        return message

    async def send(self, message: Message) -> None:
        if self.refusal is None or self.responded:
            self.responded = True
            await self._send(message)

    async def _receive_in_time(self) -> Message:
        """Receive the next message. Only time spent waiting for the client counts towards the timeout."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._time_left):
                message = await self._receive()
        except TimeoutError:
            detail = (
                f"the body arrives too slowly: {self._received:,} bytes so far; the limit is {self._timeout:g} s, "
                f"extended by 1 s for each {MIN_BYTES_PER_SECOND:,} bytes received"
            )
            self._refuse(Refusal("request-timeout", detail))
        earned = len(message.get("body", b"")) / MIN_BYTES_PER_SECOND
        self._time_left = max(0.0, min(self._time_left - (loop.time() - began) + earned, self._timeout))
        return message

    def _refuse(self, refusal: Refusal | FxError) -> NoReturn:
        self.refusal = refusal
        raise _Refused


async def _refuse(refusal: Refusal | FxError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error although the client may still be sending, and close the connection."""
    response = error_response(scope["path"], refusal)
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # By its Content-Length, the response is complete for the client.
    discarded = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while discarded < LINGER_BYTES:
                async with asyncio.timeout(LINGER_PAUSE):
                    message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
                discarded += len(message.get("body", b""))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Refused(Exception):
    pass
