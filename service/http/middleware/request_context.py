"""The outermost middleware: request id, metrics, access log, tracing span, accounting of the requests in flight, and
responses to unhandled exceptions."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.engine import Engine
from service.engine.errors import is_shortage, shortage
from service.http.problem_responses import error_response
from service.http.routing.declared import route_path
from service.http.scope import REFUSED, caller_of, header
from service.observability import logs
from service.problems import Draining, Internal, Problem

if TYPE_CHECKING:
    from service.observability.tracing import Traces

log = logging.getLogger("fxserve")
access = logging.getLogger("fxserve.access")

REQUEST_ID_LENGTH = 128

_NOT_IN_REQUEST_ID = re.compile("[^ -~]")

# JSON and images need no scripts or resources; SVG drawings have inline styles.
STRICT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def request_id(sent: str | None) -> str:
    """Return the client's request id, without characters that could forge headers or log lines, or a new id."""
    return _NOT_IN_REQUEST_ID.sub("", sent or "")[:REQUEST_ID_LENGTH].strip() or f"{random.getrandbits(128):032x}"


class RequestContext:
    """The outermost middleware: adds the request's id, metrics, log line and span, and answers unhandled exceptions.

    It registers each request with the engine, so that draining waits for it. A request that the server then cancels
    before its response has started is answered 503.

    Args:
        app: the next middleware.
        engine: counts requests in its metrics.
        policies: path of a page → its Content-Security-Policy; other paths get a strict one.
        traces: creates spans, if tracing is enabled.
        cors: middleware that lets pages of other origins read its own responses; None if none may.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        policies: Mapping[str, str] | None = None,
        traces: Traces | None = None,
        cors: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        self.app = app
        self.engine = engine
        self.traces = traces
        self._cors = cors
        self._pages = {path: _security_headers(policy) for path, policy in (policies or {}).items()}
        self._others = _security_headers(STRICT_POLICY)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        own_id = scope["request_id"] = request_id(header(scope, b"x-request-id"))
        # HEAD is answered as GET, and the server omits the body. A copy, because the server uses its scope's method.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 429:
                    scope[REFUSED] = float(dict(message["headers"]).get(b"retry-after", 1))
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", own_id.encode("ascii")),
                    *self._pages.get(route_path(scope), self._others),
                ]
            await send(message)

        traced: AbstractContextManager[Any] = nullcontext() if self.traces is None else self.traces.request(scope)
        entered = logs.request_id.set(own_id)
        # Reads that arrive while the engine drains are answered, but not waited for.
        in_flight = nullcontext() if self.engine.draining else self.engine.in_flight
        with traced as span, in_flight:
            try:
                await self.app(inner, receive, send_with_id)
            except ClientDisconnect:
                status = status or 499  # nginx's status for a client that closed the connection, for the metrics
            except asyncio.CancelledError:
                if status or not self.engine.draining:
                    raise
                await self._response(scope, Draining())(scope, receive, send_with_id)
            except Exception as error:
                log.exception("request %r: %s %r failed", own_id, scope["method"], scope["path"])
                if status:
                    raise  # the response has started, so the connection is closed
                problem = shortage(error) if is_shortage(error) else Internal()  # the details are only in the log
                await self._response(scope, problem)(scope, receive, send_with_id)
            finally:
                seconds = time.perf_counter() - started
                if inner is not scope:  # the route and the caller, for metrics and traces
                    scope.update(inner, method="HEAD")
                self.engine.metrics.observe(scope, status, seconds)
                if access.isEnabledFor(logging.INFO):
                    _log_response(scope, status, seconds)
                logs.request_id.reset(entered)
            if self.traces is not None:
                self.traces.responded(span, scope, status, caller_of(scope).key)

    def _response(self, scope: Scope, problem: Problem) -> ASGIApp:
        response = error_response(route_path(scope), problem)
        return response if self._cors is None else self._cors(response)


def _log_response(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    key = caller_of(scope).key
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_ms": round(seconds * 1000, 3),
        "client": client[0] if client else None,
        "key": key,
    }
    origin = " from %(client)s" * bool(client) + " with key %(key)s" * bool(key)
    access.info(f"%(method)s %(path)s %(status)s %(duration_ms)s ms{origin}", fields, extra={"fields": fields})


def _security_headers(policy: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-content-type-options", b"nosniff"),
        (b"content-security-policy", policy.encode("ascii")),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
    ]
