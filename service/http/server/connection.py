"""The connection class of ``fxserve serve``: uvicorn's, with timeouts for stalling clients and limits on heads.

uvicorn waits forever for the rest of a request's head and for a client to read its response, and holds heads of any
size in memory. It also mistakes the body of a request that offers an upgrade for the next request.
"""

from __future__ import annotations

import asyncio
import select
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.http.middleware.body_limit import LINGER_BYTES, LINGER_SECONDS
from service.http.middleware.request_context import request_id
from service.http.problem_responses import error_response
from service.http.routing.declared import route_path
from service.http.scope import REFUSED, header
from service.http.server import heads
from service.http.server.transport import HeadWithBody, SendTimeout
from service.problems import Draining, NotHTTP, Problem, RequestTimeout

HEAD_SECONDS = 10.0
"""Maximum seconds from the start of a connection, or from a head's first bytes, to the head's end. Also the maximum
from a response to the end of its request's body, if the response came first."""

MAX_PIPELINED = 64
"""Maximum pipelined requests: a connection that sends more ahead of their responses is closed."""

LAST_SECONDS = 0.1
"""Seconds that an idle connection stays open when the server shuts down, for requests already sent."""

HOLD_SECONDS = 5.0
"""Maximum seconds that reading pauses after admission refused a request, in line with its ``Retry-After``. Clients that
retry at once would keep the server busy with refusals, so they wait this long once more."""

EARLY = 0.8
"""Share of the pause at which a client that has already sent its next request counts as impatient. It is below 1 so
that a client that waits exactly as requested is not penalised by a late timer."""


class Phase(Enum):
    """The part of a request that a connection is reading."""

    IDLE = auto()
    """The next request has not begun."""
    HEAD = auto()
    BODY = auto()
    """A body, including its trailers."""
    ENDED = auto()
    """Nothing more: further data is discarded."""


class Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = Phase.IDLE
        # Bytes of a head, since the last data of a body, or discarded. Data that arrives together with the end of an
        # earlier request does not count, because it is unknown how much of it belongs to the next head.
        self._pending_bytes = 0
        self._method_read = False  # until then, the parser's method is that of the request before
        self._draining = False
        self._responding: RequestResponseCycle | None = None  # the request that the application is processing
        self._deadline: asyncio.TimerHandle | None = None  # of a head, or of the client's closing
        self._hold: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._send_timeout = SendTimeout(transport, self.loop)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._send_timeout.stop()
        self._unset_keepalive_if_required()  # uvicorn does not if the connection was reset
        if self._hold is not None:
            self._hold.cancel()
        if self._responding is not None:  # uvicorn notifies only the last request, which may wait behind this one
            _disconnect(self._responding)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pending_bytes += len(data)
        if self._phase is Phase.ENDED:
            if self._pending_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._method_read |= not isinstance(error, httptools.HttpParserInvalidMethodError)
            fault = error.__context__  # the exception raised by a callback
            self._end(fault if isinstance(fault, Problem) else NotHTTP())
            return
        if self._phase is not Phase.IDLE and self._pending_bytes > heads.MAX_HEAD_BYTES:
            self._end(heads.too_large())  # a head, trailers, or extensions of chunks
        elif self._phase is Phase.HEAD:
            self._expect_head()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. An upgrade that a request offers is ignored, as RFC 9110, 7.8 allows.

        After such a head the parser stops and treats the rest as another protocol. A new parser therefore reads the
        head again without the offer, followed by the body.

        Raises:
            HttpParserError: the data is not HTTP.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                version, method = self.parser.get_http_version(), self.parser.get_method()
                data = heads.without_upgrade(version, method, self.url, self.headers) + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise RuntimeError("too many requests at once")  # ends the parsing
        self._unset_keepalive_if_required()  # not on empty lines, which are not a request
        super().on_message_begin()
        self._phase = Phase.HEAD
        self._method_read = False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._method_read = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.HEAD:  # trailers come too late to change anything
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        self.url = heads.check(version, self.parser.get_method(), self.url, self.headers)
        if version == "1.0":
            self.expect_100_continue = False
        if self.parser.should_upgrade():  # see _parse
            return
        super().on_headers_complete()
        self._read_on(Phase.BODY)
        # A response only writes and closes.
        self.cycle.transport = HeadWithBody(self.transport, self.loop)  # type: ignore[assignment]
        if self._draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._read_on(Phase.IDLE)
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before its body ended
            self._expect_request()
            self._hold_if_refused()

    def _read_on(self, phase: Phase) -> None:
        self._phase = phase
        self._pending_bytes = 0
        self._cancel_deadline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._responding = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # uvicorn resumes reading after each response: a client that sends faster than it receives would fill the
        # memory.
        if self.pipeline or self._hold is not None:
            self.flow.pause_reading()
        self._hold_if_refused()
        if self._phase is not Phase.IDLE:  # uvicorn now treats the connection as idle
            self._unset_keepalive_if_required()
        if self._phase is Phase.BODY and self.cycle.response_complete and not self.transport.is_closing():
            self._expect_head()  # here: the rest of the body

    def _hold_if_refused(self) -> None:
        """Pause reading if admission refused the last request and its body has been read."""
        if self._phase is not Phase.IDLE or not self.cycle.response_complete or self._hold is not None:
            return
        wait: Any = self.cycle.scope.get(REFUSED)
        if wait is not None and not self.transport.is_closing():
            self.flow.pause_reading()
            # Closing the idle connection would reset it if the next request is waiting unread.
            self._unset_keepalive_if_required()
            self._hold = self.loop.call_later(EARLY * min(wait, HOLD_SECONDS), self._end_hold)

    def _end_hold(self) -> None:
        """Resume reading; if the next request came too early, wait longer."""
        if not self.transport.is_closing() and _has_unread(self.transport):
            self._hold = self.loop.call_later(HOLD_SECONDS, self._resume)
        else:
            self._resume()

    def _resume(self) -> None:
        self._hold = None
        if not self.transport.is_closing():
            self._expect_request()
            self.flow.resume_reading()

    def _expect_request(self) -> None:
        """Start the keep-alive timeout."""
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def shutdown(self) -> None:
        """Serve a request that has already arrived, then close.

        uvicorn closes an idle connection at once. Under load its next request may be in the system's buffer, and
        closing would reset the connection.
        """
        self._draining = True
        if self._busy():
            super().shutdown()
        else:
            self.loop.call_later(LAST_SECONDS, self._end_if_idle)

    def _busy(self) -> bool:
        """Return whether a request is waiting for its response."""
        return self.cycle is not None and not self.cycle.response_complete

    def _end_if_idle(self) -> None:
        if not self._busy() and not self.transport.is_closing():
            self._end(Draining())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timeout.start()

    def resume_writing(self) -> None:
        self._send_timeout.stop()
        super().resume_writing()

    def _expect_head(self) -> None:
        """Start the timeout for a head, or for the rest of a body whose request is already answered."""
        if self._deadline is None:
            why = RequestTimeout(f"the request's head did not end within {HEAD_SECONDS:g} s")
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._end, why)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self, why: Problem) -> None:
        """Stop reading, and answer the request being read with ``why``.

        If earlier requests are still unanswered, the connection is closed after their responses, and ``why`` is not
        sent: it could be taken for one of them. A request whose body is not read to its end gets no other response.
        """
        unread = self.cycle if self._phase is Phase.BODY else None
        earlier = [cycle for cycle in self._awaiting_responses() if cycle is not unread]
        can_respond = self._phase is Phase.HEAD or (unread is not None and not unread.response_started)
        if unread is not None:
            _disconnect(unread)
        self._read_on(Phase.ENDED)
        if earlier:
            earlier[-1].keep_alive = False  # so uvicorn closes the connection after it
        elif can_respond:
            self._refuse(why, None if unread is None else cast(Scope, unread.scope))
        else:
            self.transport.close()

    def _refuse(self, why: Problem, scope: Scope | None) -> None:
        """Send ``why`` and close our side of the connection.

        The client has some time to close its own side: closing with unread bytes would reset the connection, which can
        destroy the response.
        """
        is_head = self._method_read and self.parser.get_method() == b"HEAD"
        self.transport.write(_written(why, scope, with_body=not is_head))
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _awaiting_responses(self) -> list[RequestResponseCycle]:
        """Return the requests that wait for their responses, in order."""
        running = [] if self._responding is None or self._responding.response_complete else [self._responding]
        return [*running, *(cycle for cycle, _ in reversed(self.pipeline))]


def _has_unread(transport: asyncio.Transport) -> bool:
    """Return whether the client has sent data that is not read yet, and has not closed its side."""
    closed = getattr(select, "POLLRDHUP", 0)  # Linux
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN | closed)
    return any(events & select.POLLIN and not events & closed for _, events in poll.poll(0))


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Mark a request as disconnected."""
    cycle.disconnected = True
    cycle.message_event.set()


def _written(why: Problem, scope: Scope | None, *, with_body: bool) -> bytes:
    """Serialize the last response of a connection. Without a ``scope``, the request's path and id are unknown."""
    response = error_response("" if scope is None else route_path(scope), why)
    id = request_id(None if scope is None else header(scope, b"x-request-id"))
    status = HTTPStatus(response.status_code)
    fields = [*response.raw_headers, (b"x-request-id", id.encode()), (b"connection", b"close")]
    head = b"".join(b"%b: %b\r\n" % field for field in fields)
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
        + head
        + b"\r\n"
        + (bytes(response.body) if with_body else b"")
    )
