"""Middleware for every request: its id, its metrics, limits on its body, and an answer even after a bug.

Plain ASGI, because ``BaseHTTPMiddleware`` hides disconnects from the routes.
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
"""Key in the scope of a request that admission refused: the ``Retry-After`` it was given, in seconds."""

_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")

# Closing a connection with unread bytes resets it, and the client may lose the answer. So a client that is still
# sending when it is refused gets this long to notice; what it sends is discarded, until it pauses or sends too much.
LINGER_SECONDS, LINGER_PAUSE = 5.0, 1.0
LINGER_BYTES = 16 * 1024**2

MIN_BYTES_PER_SECOND = 64 * 1024
"""Half a megabit a second; slower clients hold memory that others could use."""

MAX_OTHER_BYTES = 2 * 1024**2
"""Largest body without images: twice a spec of the most nodes with the longest names. Some bodies are parsed on the
event loop, into objects of ten times their size."""

_WITH_IMAGES = ("/features", "/infer", "/embeddings")

# JSON and images run no scripts and load nothing. Drawings have inline styles.
STRICT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def request_id(sent: str | None) -> str:
    """The id to answer with: the one that was sent, without characters that could forge a log line, or a new one."""
    return _NOT_IN_REQUEST_ID.sub("", sent or "")[:REQUEST_ID_LENGTH] or f"{random.getrandbits(128):032x}"


class RequestContext:
    """The outermost middleware: the request's id, its metrics, log line and span, and an answer if nothing inside gave
    one.

    Args:
        policies: the Content-Security-Policy of pages by path; all other paths have a strict one.
        traces: where spans go, if anywhere.
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
                await self._answer(scope, receive, send)
                return
            with self.traces.request(scope) as span:
                status = await self._answer(scope, receive, send)
                self.traces.answered(span, scope, status)
        finally:
            logs.request_id.reset(entered)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """The status of the answer."""
        started = time.perf_counter()
        status = 0
        identity = scope["request_id"]

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 429:
                    scope[REFUSED] = float(dict(message["headers"]).get(b"retry-after", 1))
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", identity.encode("ascii")),
                    *self._pages.get(scope["path"], self._others),
                ]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = status or 499  # the client is gone; nginx's number, for the metrics
        except Exception as error:
            log.exception("request %s: %s %r failed", identity, scope["method"], scope["path"])
            if status:
                raise  # the answer has begun: only the connection can be closed
            path = scope["path"]
            answer = error_response(path, shortage(error)) if is_shortage(error) else internal_response(path)
            await answer(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            self.metrics.observe(scope, status, seconds)
            if access.isEnabledFor(logging.INFO):
                _log_answer(scope, status, seconds)
        return status


def _log_answer(scope: Scope, status: int, seconds: float) -> None:
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
    """Answers HEAD as GET; the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}  # a copy: the server leaves out the body by the method in its own
        try:
            await self.app(asked, receive, send)
        finally:
            if "route" in asked:
                scope["route"] = asked["route"]  # by which metrics and traces name it


class BodyLimit:
    """Limits each body: its bytes, its time, and its share of the memory for all requests.

    One that is too large is refused by its Content-Length before a byte is read, a chunked one while it arrives. Bytes
    count towards admission from their arrival until the answer is sent, so clients that never finish sending, or do not
    read, take no more memory than admission allows.

    Args:
        app: what comes next.
        limit: most bytes of one body that carries images; others have a smaller limit.
        timeout: seconds that a client may keep the server waiting for its body. Each 64 KiB extend the remaining time
            by one second, at most to the whole.
        admission: counts the bytes.
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
        if scope["method"] in ("GET", "HEAD"):  # no route reads a body of these: it stays in the socket
            await self.app(scope, receive, send)
            return
        with self.admission.reserve() as reservation:
            set_reservation(scope, reservation)
            body = _Body(limit, self.timeout, reservation, receive, send)
            with contextlib.suppress(_Refused):
                await self.app(scope, body.receive, body.send)
        if (
            body.refusal is not None and not body.answered
        ):  # the bytes received so far are released, however long this takes
            await _refuse(body.refusal, scope, receive, send)


def _too_large(limit: int) -> Refusal:
    return Refusal("body-too-large", f"the body is larger than {limit:,} bytes, the most that is taken", limit=limit)


class _Body:
    """One body as it arrives. Once it is refused, that is the answer, whatever the route does."""

    def __init__(self, limit: int, timeout: float, reservation: Reservation, receive: Receive, send: Send) -> None:
        self.refusal: Refusal | FxError | None = None
        self.answered = False
        self._limit = limit
        self._timeout = timeout
        self._reservation = reservation
        self._receive = receive
        self._send = send
        self._seen = 0
        self._time_left = timeout
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:  # a further call waits for the disconnect
            return await self._receive()
        if self.refusal is not None:
            raise _Refused
        message = await self._in_time()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            self._seen += size
            if self._seen > self._limit:
                self._refuse(_too_large(self._limit))
            try:
                self._reservation.claim(size)
            except EngineError as full:
                self._refuse(full)
        return message

    async def send(self, message: Message) -> None:
        if self.refusal is None or self.answered:
            self.answered = True
            await self._send(message)

    async def _in_time(self) -> Message:
        """The next message. Only the time spent waiting for the client counts."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._time_left):
                message = await self._receive()
        except TimeoutError:
            detail = (
                f"{self._seen:,} bytes of the body came, and then nothing more or too little; a body may keep the "
                f"server waiting {self._timeout:g} s, and {MIN_BYTES_PER_SECOND:,} bytes extend that by one"
            )
            self._refuse(Refusal("request-timeout", detail))
        earned = len(message.get("body", b"")) / MIN_BYTES_PER_SECOND
        self._time_left = max(0.0, min(self._time_left - (loop.time() - began) + earned, self._timeout))
        return message

    def _refuse(self, refusal: Refusal | FxError) -> NoReturn:
        self.refusal = refusal
        raise _Refused


async def _refuse(refusal: Refusal | FxError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer although the client may still be sending, and close the connection."""
    response = error_response(scope["path"], refusal)
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # The answer is complete by its Content-Length.
    thrown_away = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while thrown_away < LINGER_BYTES:
                async with asyncio.timeout(LINGER_PAUSE):
                    message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
                thrown_away += len(message.get("body", b""))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Refused(Exception):
    pass
