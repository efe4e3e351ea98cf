"""What clients cannot do to a connection, in a server of its own over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from fxcore.errors import FxError
from service.engine import Engine
from service.http import problem_responses
from service.http.middleware.request_context import RequestContext
from service.http.server.connection import MAX_PIPELINED, Connection
from service.http.server.heads import MAX_HEAD_BYTES
from service.problems import AdmissionFull, Problem
from service.settings import Settings
from tests.e2e.conftest import connection_problem, response_of


class Slow:
    """An application that answers once it is told to; ``late`` if it waits between head and body, too; ``held`` if the
    whole server waits when it is asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.open = threading.Event()
        self.late: threading.Event | None = None
        self.held: threading.Event | None = None
        self.errors: list[BaseException] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.asked.set()
        if self.held is not None:
            self.held.wait(30)
        await asyncio.to_thread(self.open.wait, 30)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            if self.late is not None:
                await asyncio.to_thread(self.late.wait, 30)
            await send({"type": "http.response.body", "body": b"ok"})
        except BaseException as error:
            self.errors.append(error)
            raise


@pytest.fixture
def slow() -> Iterator[tuple[Slow, socket.socket]]:
    """The application, and a connection to it. Afterwards all that it was asked has been answered."""
    app = Slow()
    with serving(app) as connection:
        yield app, connection


@contextlib.contextmanager
def serving(app: ASGIApp, keep_alive: int = 5) -> Iterator[socket.socket]:
    """A connection to a server of ``app`` that keeps idle ones for ``keep_alive`` seconds."""
    config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, timeout_keep_alive=keep_alive)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 200_000)  # what one piece of a request may have
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        stack.callback(thread.join, 30)
        stack.callback(setattr, server, "should_exit", True)
        yield stack.enter_context(socket.create_connection(listener.getsockname(), 30))


def test_an_oversized_head_waits_for_earlier_responses(
    slow: tuple[Slow, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, connection = slow
    refused, end = threading.Event(), Connection._end

    def seen(self: Connection, why: Problem | FxError) -> None:
        end(self, why)
        refused.set()

    monkeypatch.setattr(Connection, "_end", seen)
    connection.sendall(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\n")
    assert app.asked.wait(30)
    connection.sendall(b"GET /second HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * (MAX_HEAD_BYTES + 1))
    assert refused.wait(30)
    connection.sendall(b"x" * 1000)
    app.open.set()
    assert read_until(connection, b"ok").count(b"HTTP/1.1 ") == 1
    assert connection.recv(1000) == b""
    assert not app.errors


@pytest.mark.parametrize(
    "broken", [b"garbage\r\n\r\n", b"POST /second HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\n"]
)
def test_invalid_http_waits_for_earlier_responses(slow: tuple[Slow, socket.socket], broken: bytes) -> None:
    app, connection = slow
    connection.sendall(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\n" + broken)
    assert app.asked.wait(30)
    app.open.set()
    received = response_of(connection)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(b"\r\n\r\nok")
    assert not app.errors


def test_requests_without_end_are_not_kept(slow: tuple[Slow, socket.socket]) -> None:
    app, connection = slow
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
    assert app.asked.wait(30)
    app.open.set()
    assert 1 < response_of(connection).count(b"HTTP/1.1 200 ") <= MAX_PIPELINED + 1


def test_the_running_request_is_told_of_the_disconnect(caplog: pytest.LogCaptureFixture) -> None:
    """And those behind it are not begun."""
    begun: list[str] = []
    left = threading.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        left.set()

    with serving(wait) as connection:
        post = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nb"
        connection.sendall(b"".join(post % number for number in range(3)))
        while not begun:
            left.wait(0.01)
        connection.close()
        assert left.wait(30)
    assert begun == ["/0"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_body_of_the_request_before_is_not_of_a_head(slow: tuple[Slow, socket.socket]) -> None:
    app, connection = slow
    app.held = threading.Event()
    app.open.set()
    size = MAX_HEAD_BYTES + 10_000
    connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nb" % size)
    assert app.asked.wait(30)
    connection.sendall(b"b" * (size - 1) + b"GET / HTTP/1.1\r\nHost: x\r\nX-More: ")
    app.held.set()
    answers = read_until(connection, b"ok")
    connection.sendall(b"x\r\n\r\n")
    answers += read_until(connection, b"ok")
    assert answers.count(b"HTTP/1.1 200") == answers.count(b"HTTP/1.1 ") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="counts the packets that came, as Linux does")
def test_a_response_is_one_packet(slow: tuple[Slow, socket.socket]) -> None:
    app, connection = slow
    app.open.set()
    for answers in (1, 2):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_until(connection, b"\r\n\r\nok").count(b"HTTP/1.1 200") == 1
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
        assert struct.unpack_from("I", information, 152) == (answers,)  # tcpi_data_segs_in


def test_a_head_does_not_wait_for_its_body(slow: tuple[Slow, socket.socket]) -> None:
    app, connection = slow
    app.late = threading.Event()
    app.open.set()
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    app.late.set()
    assert read_until(connection, b"ok") == b"ok"


def test_a_head_response_is_complete_without_a_body(slow: tuple[Slow, socket.socket]) -> None:
    app, connection = slow
    app.open.set()
    connection.sendall(b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    received = read_until(connection, b"\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200")
    assert connection.recv(100) == b""


@pytest.mark.parametrize("broken", [b"HEADS / HTTP/1.1", b"\x16\x03\x01"])
def test_a_refusal_after_a_head_request_has_a_body(slow: tuple[Slow, socket.socket], broken: bytes) -> None:
    app, connection = slow
    app.open.set()
    connection.sendall(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    connection.sendall(broken + b"\r\nHost: x\r\n\r\n")
    connection_problem(read_until(connection, b"}"), 400, "not-http")


def test_requests_without_bodies_do_not_count_towards_a_later_body(slow: tuple[Slow, socket.socket]) -> None:
    app, connection = slow
    app.open.set()
    for _ in range(1 + MAX_HEAD_BYTES // 60_000):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 60_000 + b"\r\n\r\n")
        assert read_until(connection, b"ok").startswith(b"HTTP/1.1 200 ")
    app.asked.clear()
    connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
    assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
    connection.sendall(b"body")
    assert read_until(connection, b"ok").startswith(b"HTTP/1.1 200 ")


async def at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the request's body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nbody", b"body"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"),
    ],
    ids=["answered before its end", "an empty line"],
)
def test_an_idle_connection_is_closed_whatever_came_last(before: bytes, after: bytes) -> None:
    with serving(at_once, keep_alive=1) as connection:
        connection.sendall(before)
        read_until(connection, b"ok")
        with contextlib.suppress(ConnectionError):  # on a slow machine it is closed before
            connection.sendall(after)
            assert connection.recv(100) == b""


def test_a_connection_on_which_a_head_has_begun_is_not_idle() -> None:
    with serving(at_once, keep_alive=1) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n")
        read_until(connection, b"ok")
        time.sleep(1.2)
        connection.sendall(b"Host: x\r\n\r\n")
        assert read_until(connection, b"ok").startswith(b"HTTP/1.1 200 ")


def read_until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        piece = connection.recv(100_000)
        assert piece, received
        received += piece
    return received


def refusing(retry_after: float, asked: list[str]) -> RequestContext:
    """An application that is always full, and notes the paths that it was asked for."""

    async def full(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        document = problem_responses.error_response(scope["path"], AdmissionFull("full", retry_after=retry_after))
        await document(scope, receive, send)

    return RequestContext(full, Engine(Settings()))


@pytest.mark.exhaustive
def test_clients_that_retry_at_once_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ignores refusals must not take the server's time with them."""
    monkeypatch.setattr("service.http.server.connection.HOLD_SECONDS", 0.5)
    asked: list[str] = []
    with serving(refusing(1.0, asked)) as connection, socket.create_connection(connection.getpeername(), 30) as other:
        began = time.monotonic()
        body = b"x" * 500_000  # which is not all there when the answer is written
        for number in range(5):
            connection.sendall(b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n" % number + body)
            received = read_until(connection, b"}")
            assert received.startswith(b"HTTP/1.1 429 ")
            if number == 1:
                other.sendall(b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n")
                read_until(other, b"}")
        # One may be read together with the end of the one before, which was answered before it had come.
        assert time.monotonic() - began >= 2
    assert asked == ["/0", "/1", "/other", "/2", "/3", "/4"]


@pytest.mark.exhaustive
def test_clients_that_wait_are_read_before_those_that_retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.server.connection.HOLD_SECONDS", 3.0)
    asked: list[str] = []
    with serving(refusing(0.6, asked)) as hasty, socket.create_connection(hasty.getpeername(), 30) as patient:
        for connection, path in ((patient, b"/patient"), (hasty, b"/hasty")):
            connection.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            read_until(connection, b"}")
        hasty.sendall(b"GET /hasty HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.8)
        patient.sendall(b"GET /patient HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(patient, b"}")
        read_until(hasty, b"}")
    assert asked == ["/patient", "/hasty", "/patient", "/hasty"]


@pytest.mark.exhaustive
def test_a_refused_client_is_not_closed_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request waits unread while the server would count its connection as idle, and reset it."""
    monkeypatch.setattr("service.http.server.connection.HOLD_SECONDS", 1.5)
    with serving(refusing(1.5, asked=[]), keep_alive=1) as connection:
        for _ in range(2):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_until(connection, b"}").startswith(b"HTTP/1.1 429 ")
