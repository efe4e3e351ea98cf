"""A connection of the server that ``fxserve serve`` runs: uvicorn's, but it gives up on clients that stall.

uvicorn itself waits forever for the rest of a request's head, and for a client to read its response, and holds heads of
any size in memory. It also loses the body of a request that offers an upgrade, and reads it as the next request.
"""

from __future__ import annotations

import asyncio
import select
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.http.middleware.body_limit import LINGER_BYTES, LINGER_SECONDS
from service.http.middleware.request_context import REFUSED, request_id
from service.http.problem_responses import error_response
from service.http.server import heads
from service.http.server.transport import HeadWithBody, SendTimeout
from service.problems import Draining, NotHTTP, Problem, RequestTimeout

HEAD_SECONDS = 10.0
"""From the start of a connection, or a head's first bytes, to the head's end; also from a request's response to the end
of its body, where that came first."""

MAX_PIPELINED = 64
"""Requests that one connection may send ahead of their responses; one that sends more is closed after so many."""

LAST_SECONDS = 0.1
"""How long a connection without a request stays open when the server ends, for what its client has sent already."""

HOLD_SECONDS = 5.0
"""Longest time that a connection is not read after admission refused its request, as its ``Retry-After`` asks. Clients
that retry at once would keep the server busy with refusals; they wait for so long once more."""

EARLY = 0.8
"""Share of that time after which a client that has sent its next request has not waited. Those that wait exactly as
told must not lose to a timer that runs late."""


class Phase(Enum):
    """What a connection reads."""

    IDLE = auto()
    """The next request has not begun."""
    HEAD = auto()
    BODY = auto()
    """A body, its trailers included."""
    ENDED = auto()
    """Nothing more; what still comes is discarded."""


class Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = Phase.IDLE
        # Of a head, since the last data of a body, or discarded. What comes together with the end of an earlier request
        # does not count: how much of it belongs to the next head is not known.
        self._pending_bytes = 0
        self._draining = False
        self._responding: RequestResponseCycle | None = None  # the request that the application works on
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
        if self._responding is not None:  # uvicorn tells the last request only, which may wait behind this one
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
            fault = error.__context__  # what a callback raised
            self._end(fault if isinstance(fault, Problem) else NotHTTP())
            return
        if self._phase is not Phase.IDLE and self._pending_bytes > heads.MAX_HEAD_BYTES:
            self._end(heads.too_large())  # a head, trailers, or extensions of chunks
        elif self._phase is Phase.HEAD:
            self._expect_head()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. An upgrade that a request offers is ignored, as RFC 9110, 7.8 allows.

        After such a head the parser stops and takes what follows for another protocol. So a new parser reads the head
        again without the offer, and then the body.

        Raises:
            HttpParserError: it is not HTTP.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                version, method = self.parser.get_http_version(), self.parser.get_method()
                data = heads.without_upgrade(version, method, self.url, self.headers) + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise RuntimeError("too many requests at once")  # which ends the parsing
        self._unset_keepalive_if_required()  # not by empty lines, which are no request
        super().on_message_begin()
        self._phase = Phase.HEAD

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
        if self.cycle.response_complete:  # it was answered before its end
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
        # uvicorn reads on after each response, and a client that sends faster than it gets them would fill the memory.
        if self.pipeline or self._hold is not None:
            self.flow.pause_reading()
        self._hold_if_refused()
        if self._phase is not Phase.IDLE:  # uvicorn takes the connection for idle now
            self._unset_keepalive_if_required()
        if self._phase is Phase.BODY and self.cycle.response_complete and not self.transport.is_closing():
            self._expect_head()  # in this case the rest of the body

    def _hold_if_refused(self) -> None:
        """Stop reading for a while if the last request has been read to its end and was refused by admission."""
        if self._phase is not Phase.IDLE or not self.cycle.response_complete or self._hold is not None:
            return
        wait: Any = self.cycle.scope.get(REFUSED)
        if wait is not None and not self.transport.is_closing():
            self.flow.pause_reading()
            # Closing an idle connection would reset it, where its next request waits unread.
            self._unset_keepalive_if_required()
            self._hold = self.loop.call_later(EARLY * min(wait, HOLD_SECONDS), self._end_hold)

    def _end_hold(self) -> None:
        """Read the next request; if it has come too early, later."""
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
        """Start the time limit of an idle connection."""
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def shutdown(self) -> None:
        """Serve a request that has arrived already, then close.

        uvicorn closes an idle connection at once. Under load its next request may be in the system's buffer, and
        closing would reset the client."""
        self._draining = True
        if self._busy():
            super().shutdown()
        else:
            self.loop.call_later(LAST_SECONDS, self._end_if_idle)

    def _busy(self) -> bool:
        """Return whether a request waits for its response."""
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
        """Start the time limit for a head, or for what is left of a body whose request is answered."""
        if self._deadline is None:
            why = RequestTimeout(f"the request's head did not end within {HEAD_SECONDS:g} s")
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._end, why)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self, why: Problem) -> None:
        """Read nothing more, and answer the request that is being read with ``why``.

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
            self._refuse(why)
        else:
            self.transport.close()

    def _refuse(self, why: Problem) -> None:
        """Send ``why`` and close our side of the connection. The client has some time to close its own: closing it with
        unread bytes would be a reset, which can destroy the response."""
        self.transport.write(_written(why, with_body=self.parser.get_method() != b"HEAD"))
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _awaiting_responses(self) -> list[RequestResponseCycle]:
        """Requests that were read and wait for their responses, in their order."""
        running = [] if self._responding is None or self._responding.response_complete else [self._responding]
        return [*running, *(cycle for cycle, _ in reversed(self.pipeline))]


def _has_unread(transport: asyncio.Transport) -> bool:
    """Return whether the client has sent something that is not read yet, and has not closed its side."""
    closed = getattr(select, "POLLRDHUP", 0)  # Linux
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN | closed)
    return any(events & select.POLLIN and not events & closed for _, events in poll.poll(0))


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell a request that it can neither be read nor answered further."""
    cycle.disconnected = True
    cycle.message_event.set()


def _written(why: Problem, *, with_body: bool) -> bytes:
    """Return the last response of a connection, to a request whose path and id are not known."""
    response = error_response("", why)
    status = HTTPStatus(response.status_code)
    fields = [*response.raw_headers, (b"x-request-id", request_id(None).encode()), (b"connection", b"close")]
    head = b"".join(b"%b: %b\r\n" % field for field in fields)
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
        + head
        + b"\r\n"
        + (bytes(response.body) if with_body else b"")
    )
