"""Limits on request bodies."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.engine.requests.admission.admission import Admission, Reservation
from service.http.problem_responses import error_response
from service.http.routing.declared import DeclaredRoutes, route_path
from service.http.scope import RESERVATION, caller_of, header
from service.problems import BodyTooLarge, Problem, RequestTimeout

# Closing a connection with unread bytes resets it, and the client may lose the response (RFC 9112, 9.6). The rest of a
# refused body is therefore read and discarded, within these limits of time, pause and size.
LINGER_SECONDS, LINGER_PAUSE = 5.0, 1.0
LINGER_BYTES = 16 * 1024**2

MIN_BYTES_PER_SECOND = 64 * 1024
"""Minimum average rate of a body: slower clients hold memory that others could use."""

MAX_OTHER_BYTES = 2 * 1024**2
"""Maximum bytes of a body without images: twice the largest possible spec. Some of these are parsed on the event
loop."""


class BodyLimit:
    """Middleware that limits request bodies in size, time and total memory.

    A body that is too large is refused before it is read if it has a Content-Length, and otherwise while it arrives.
    Bytes are reserved in admission from their arrival until the response is sent, so that stalling clients cannot hold
    more memory than admission allows.

    Args:
        app: the next middleware.
        routes: the kind of the body of each route.
        limit: maximum bytes of a body with images; others have a smaller limit.
        timeout: seconds that the server waits for a body. Each 64 KiB received extends the remaining time by a second,
            up to ``timeout``.
        admission: the admission that reserves the bytes.
    """

    def __init__(self, app: ASGIApp, routes: DeclaredRoutes, limit: int, timeout: float, admission: Admission) -> None:
        self.app = app
        self.routes = routes
        self.limit = limit
        self.timeout = timeout
        self.admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        images = self.routes.find(scope).body == "images"
        limit = self.limit if images else min(self.limit, MAX_OTHER_BYTES)
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            await _refuse(_too_large(limit), scope, receive, send)
            return
        if scope["method"] == "GET":  # no route reads such a body, so leave it in the socket
            await self.app(scope, receive, send)
            return
        with Reservation(self.admission, caller_of(scope).client) as reservation:
            scope[RESERVATION] = reservation
            body = _Body(limit, self.timeout, reservation, receive, send)
            with contextlib.suppress(_Refused):
                await self.app(scope, body.receive, body.send)
        if body.refusal is not None and not body.responded:  # after the reservation is released: this may take long
            await _refuse(body.refusal, scope, receive, send)


def _too_large(limit: int) -> Problem:
    return BodyTooLarge(f"the body is larger than the limit of {limit:,} bytes", limit=limit)


class _Body:
    """A body being received. Once it is refused, the route's response is dropped."""

    def __init__(self, limit: int, timeout: float, reservation: Reservation, receive: Receive, send: Send) -> None:
        self.refusal: Problem | None = None
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
        """Receive the next message. Only time spent waiting for the client counts towards the timeout."""
        if self._complete:  # further calls wait for the disconnect
            return await self._receive()
        if self.refusal is not None:
            raise _Refused
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
            self._refuse(RequestTimeout(detail))
        size = len(message.get("body", b""))
        left = self._time_left - (loop.time() - began) + size / MIN_BYTES_PER_SECOND
        self._time_left = max(0.0, min(left, self._timeout))
        if message["type"] == "http.request":
            self._complete = not message.get("more_body", False)
            self._received += size
            if self._received > self._limit:
                self._refuse(_too_large(self._limit))
            try:
                self._reservation.claim(size)
            except Problem as full:
                self._refuse(full)
        return message

    async def send(self, message: Message) -> None:
        if self.refusal is None or self.responded:
            self.responded = True
            await self._send(message)

    def _refuse(self, refusal: Problem) -> NoReturn:
        self.refusal = refusal
        raise _Refused


async def _refuse(refusal: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error although the client may still be sending, and close the connection."""
    response = error_response(route_path(scope), refusal)
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # The response has a Content-Length, so it is complete for the client.
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
