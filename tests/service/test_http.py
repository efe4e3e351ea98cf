"""How requests are read off a connection: RFC 9110 and 9112, in a server of its own over real sockets."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from service.connection import Connection


class Echo:
    """An application that answers with the request as it was understood, and keeps all of them."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        understood = {
            "line": f"{request.method} {request.url.path}",
            "query": request.url.query,
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
            "body": (await request.body()).decode("latin-1"),
        }
        understood["headers_after_body"] = len(scope["headers"])
        self.requests.append(understood)
        await JSONResponse(understood)(scope, receive, send)


class Echoing:
    """A running server of :class:`Echo`."""

    def __init__(self, app: Echo, address: tuple[str, int]) -> None:
        self.app = app
        self.address = address

    def lines(self) -> list[str]:
        """Method and path of all requests so far."""
        return [request["line"] for request in self.app.requests]

    def ask(self, *pieces: bytes) -> bytes:
        """All that comes back for what is sent, piece by piece, until the server closes or 30 s are over."""
        with socket.create_connection(self.address, timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                connection.sendall(piece)
            received = b""
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(65536):
                    received += piece
            return received


@pytest.fixture
def echo() -> Iterator[Echoing]:
    app = Echo()
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        stack.callback(thread.join, 30)
        stack.callback(setattr, server, "should_exit", True)
        yield Echoing(app, listener.getsockname())


def bodies(received: bytes) -> list[dict[str, Any]]:
    """The documents of all answers, which have to be 200."""
    documents = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), received
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        documents.append(json.loads(rest[:length]))
        received = rest[length:]
    return documents


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "websocket": b"Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n",
    "two lines": b"Connection: close\r\nConnection: Upgrade\r\nUpgrade: TLS/1.0, h2c\r\n",
}
SMUGGLED = b"DELETE /v1/extractors/mine HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_that_is_offered_is_ignored_and_its_body_read(echo: Echoing, upgrade: str, chunked: bool) -> None:
    body, framing = SMUGGLED, b"Content-Length: %d" % len(SMUGGLED)
    if chunked:
        body, framing = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED), b"Transfer-Encoding: chunked"
    request = b"POST /first HTTP/1.1\r\nHost: x\r\n" + UPGRADES[upgrade] + framing + b"\r\n\r\n" + body
    rest = b"" if upgrade == "two lines" else LAST
    first, *others = bodies(echo.ask(request + rest))
    assert (first["line"], first["body"]) == ("POST /first", SMUGGLED.decode())
    assert [other["line"] for other in others] == (["GET /last"] if rest else [])
    assert "DELETE /v1/extractors/mine" not in echo.lines()


def test_the_pieces_that_an_upgrade_comes_in_change_nothing(echo: Echoing) -> None:
    request = b"POST /first HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n"
    request = request % len(SMUGGLED) + SMUGGLED + LAST
    for size in (1, 7, 64):
        pieces = [request[at : at + size] for at in range(0, len(request), size)]
        assert [one["line"] for one in bodies(echo.ask(*pieces))] == ["POST /first", "GET /last"]
    assert echo.app.requests[0]["body"] == SMUGGLED.decode()


def test_a_tunnel_is_refused_and_nothing_behind_it_is_read(echo: Echoing) -> None:
    received = echo.ask(b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n" + SMUGGLED)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"\r\n\r\n") == 1
    assert not echo.lines()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_offers_h2c_and_is_answered(echo: Echoing) -> None:
    url = "http://{}:{}/first".format(*echo.address)
    command = ["curl", "-sS", "--http2", "-H", "Expect:", "--data-binary", SMUGGLED.decode(), url]
    answer = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert json.loads(answer.stdout)["body"] == SMUGGLED.decode()
