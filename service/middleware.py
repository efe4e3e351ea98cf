"""What happens to every request: an id, a count, a limit on its body, and an answer even where our code is wrong.

Plain ASGI, because ``BaseHTTPMiddleware`` hides a client's leaving from the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.metrics import RequestMetrics
from service.problems import Refusal, error_response, internal_response

log = logging.getLogger("fxserve")

REQUEST_ID_LENGTH = 128
_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")

# Once refused, a client that is still sending gets this long to notice, so that the answer is not lost to a reset
# connection; what it sends meanwhile is thrown away.
LINGER_SECONDS = 0.5
LINGER_BYTES = 1024**2


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a request header; ``name`` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def request_id(sent: str | None) -> str:
    """The id to answer with: what was sent, less anything that could forge a log line, or a new one."""
    return _NOT_IN_REQUEST_ID.sub("", sent or "")[:REQUEST_ID_LENGTH] or uuid.uuid4().hex


class RequestContext:
    """Outermost: the request's id, its metrics, and the answer where nothing inside gave one."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0
        identity = request_id(header(scope, b"x-request-id"))
        scope["request_id"] = identity

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", identity.encode("ascii")),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = status or 499  # nobody is left to answer; nginx's number, for the metrics
        except Exception:
            log.exception("request %s: %s %r failed", identity, scope["method"], scope["path"])
            if status:
                raise  # the answer has begun: all that is left is to break the connection off
            await internal_response(scope["path"])(scope, receive, send_with_id)
        finally:
            self.metrics.observe(scope, status, time.perf_counter() - started)


class BodyLimit:
    """Refuses bodies over ``limit`` bytes: by their Content-Length before a byte is read, chunked ones on the way."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self.limit:
            await self._refuse(scope, receive, send)
            return
        seen = 0
        started = False

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.limit:
                    raise _BodyTooLarge
            return message

        async def send_unless_refused(message: Message) -> None:
            nonlocal started
            # Whatever the route makes of the broken-off body, the answer is the refusal below.
            if started or seen <= self.limit:
                started = True
                await send(message)

        with contextlib.suppress(_BodyTooLarge):
            await self.app(scope, receive_counted, send_unless_refused)
        if seen > self.limit and not started:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"the body is larger than {self.limit:,} bytes, the most that is taken"
        refusal = Refusal("body-too-large", detail, {"Connection": "close"}, limit=self.limit)
        response = error_response(scope["path"], refusal)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # The answer is out and complete by its Content-Length. Closing now, with unread bytes, would reset the
        # connection and could take the answer with it.
        thrown_away = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while thrown_away < LINGER_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
                    thrown_away += len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _BodyTooLarge(Exception):
    pass
