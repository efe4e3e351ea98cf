"""How requests are read off a connection: RFC 9110 and 9112, in a server of its own over real sockets."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from service.http.server.heads import MAX_HEAD_BYTES
from tests.e2e.conftest import connection_problem, response_of
from tests.service.http.server.test_connection import serving


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
            return response_of(connection)


@pytest.fixture(scope="module")
def started() -> Iterator[Echoing]:
    app = Echo()
    with serving(app) as connection:
        yield Echoing(app, connection.getpeername())


@pytest.fixture
def echo(started: Echoing) -> Echoing:
    started.app.requests.clear()
    return started


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
def test_curl_offers_h2c_and_gets_http_1(echo: Echoing) -> None:
    url = "http://{}:{}/first".format(*echo.address)
    command = ["curl", "-sS", "--http2", "-H", "Expect:", "--data-binary", SMUGGLED.decode(), url]
    response = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert json.loads(response.stdout)["body"] == SMUGGLED.decode()


def head_of(size: int) -> bytes:
    """A head of so many bytes."""
    line = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: "
    return line + b"x" * (size - len(line) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("pieces", ["whole", "halves", "behind another request"])
def test_the_largest_head_is_exact(echo: Echoing, pieces: str) -> None:
    for size, status in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431), (100_000, 431)):
        head = head_of(size)
        if pieces == "halves":
            received = echo.ask(head[: size // 2], head[size // 2 :])
        elif pieces == "whole":
            received = echo.ask(head)
        else:
            received = echo.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + head)
        assert received.startswith(b"HTTP/1.1 200 " if pieces.startswith("behind") else b"HTTP/1.1 %d " % status)
        assert echo.lines().count("GET /large") == (1 if status == 200 else 0)
        echo.app.requests.clear()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: x\r\nHost: y\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x y\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x/y\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: user@x\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x:port\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x, y:1, z\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: \xc3\xa9\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [::1\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: x:80\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost:\r\n", 200),
        (b"GET / HTTP/1.0\r\n", 200),
        (b"GET / HTTP/2.0\r\nHost: x\r\n", 505),
        (b"GET / HTTP/0.9\r\nHost: x\r\n", 505),
        (b"GET / HTTP/9.9\r\nHost: x\r\n", 400),
        (b"GET /\r\n", 505),
        (b"GARBAGE\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n folded\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: a\x00b\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n", 200),
        (b"TRACE / HTTP/1.1\r\nHost: x\r\n", 200),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n", 400),
        (b"GET x HTTP/1.1\r\nHost: x\r\n", 400),
        (b"GET ftp://x/ HTTP/1.1\r\nHost: x\r\n", 400),
        (b"GET http:///path HTTP/1.1\r\nHost: x\r\n", 400),
        (b"GET http://user@x/ HTTP/1.1\r\nHost: x\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
def test_heads_as_the_standard_has_them(
    echo: Echoing, head: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    closing = b"" if head.startswith((b"PRI", b"\x16", b"GET /\r")) else b"Connection: close\r\n"
    received = echo.ask(head + closing + b"\r\n")
    assert received.startswith(b"HTTP/1.1 %d " % status), received
    assert len(echo.lines()) == (status == 200)
    if status != 200:
        connection_problem(received, status, {400: "not-http", 505: "http-version"}[status])
    assert not caplog.records  # what a client sends is no error of the server


@pytest.mark.parametrize(
    "head",
    [
        b"HEAD x HTTP/1.1\r\nHost: x",
        b"HEAD /\xff HTTP/1.1\r\nHost: x",
        b"HEAD / HTTP/1.1",
        b"HEAD / HTTP/2.0\r\nHost: x",
    ],
)
def test_a_head_request_that_is_refused_has_no_body(echo: Echoing, head: bytes) -> None:
    received = echo.ask(head + b"\r\n\r\n")
    assert received[9:12] in (b"400", b"505")
    assert received.endswith(b"\r\n\r\n")
    assert b"content-length: " in received


@pytest.mark.parametrize(
    ("framing", "body", "status"),
    [
        ("Content-Length: 5\r\nContent-Length: 5", "hello", 400),
        ("Content-Length: 5\r\nContent-Length: 6", "hello!", 400),
        ("Content-Length: 5, 5", "hello", 400),
        ("Content-Length: +5", "hello", 400),
        ("Content-Length: -1", "hello", 400),
        ("Content-Length: 5 ", "hello", 200),
        ("Content-Length: 99999999999999999999999", "hello", 400),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", "0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5", "0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked", "5\r\nhello\r\n0\r\n\r\n", 200),
        ("Transfer-Encoding: Chunked", "5\r\nhello\r\n0\r\n\r\n", 200),
        ("Transfer-Encoding: chunked", "5;name=value\r\nhello\r\n0;last\r\n\r\n", 200),
        ("Transfer-Encoding: chunked", "00000005\r\nhello\r\n0\r\n\r\n", 200),
        ("Transfer-Encoding: chunked", "0x5\r\nhello\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked", "5\nhello\n0\n\n", 400),
        ("Transfer-Encoding: chunked", "-5\r\nhello\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked", "5\r\nhello0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked", "fffffffffffffffff\r\nhello\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked, identity", "0\r\n\r\n", 400),
        ("Transfer-Encoding: identity", "hello", 400),
        ("Transfer-Encoding: gzip", "hello", 400),
        ("Transfer-Encoding: xchunked", "5\r\nhello\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding : chunked", "5\r\nhello\r\n0\r\n\r\n", 400),
    ],
)
def test_how_long_a_body_is_has_one_reading(echo: Echoing, framing: str, body: str, status: int) -> None:
    received = echo.ask(f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{framing}\r\n\r\n{body}".encode())
    assert received.startswith(b"HTTP/1.1 %d " % status), received
    if status == 200:
        assert echo.app.requests[0]["body"] == "hello"
    else:
        connection_problem(received, 400, "not-http")
        assert not echo.lines()


def test_a_target_with_a_host_replaces_the_host(echo: Echoing) -> None:
    for target, path in (("http://other:1/a?b=c", "/a"), ("HTTPS://other:1", "/"), ("http://other:1?b=c", "/")):
        [response] = bodies(echo.ask(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()))
        assert (response["line"], response["query"]) == (f"GET {path}", "b=c" if "?" in target else "")
        assert [value for name, value in response["headers"] if name == "host"] == ["other:1"]


def test_http_1_0_gets_no_100_continue(echo: Echoing) -> None:
    request = b"POST / HTTP/1.%d\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    assert echo.ask(request % 1, b"hello").startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    assert echo.ask(request % 0, b"hello").startswith(b"HTTP/1.1 200 ")


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"


def test_trailers_change_nothing(echo: Echoing) -> None:
    first, _ = bodies(echo.ask(CHUNKED + b"0\r\nX-Request-ID: forged\r\nHost: y\r\n\r\n" + LAST))
    assert (first["body"], first["headers_after_body"]) == ("hello", 2)


@pytest.mark.parametrize("start", [b"0\r\nX-Long: ", b"5;name="])
def test_what_is_neither_head_nor_body_has_an_end(echo: Echoing, start: bytes) -> None:
    received = echo.ask(CHUNKED, start, *[b"x" * 60_000] * 10)
    connection_problem(received, 431, "head-too-large")
    assert not echo.lines()


@pytest.mark.parametrize(
    ("path", "media_type", "fields"),
    [
        (b"/v1/extractors", b"application/problem+json", {"type", "title", "status", "detail"}),
        (b"/v1/embeddings", b"application/json", {"error"}),
        (b"/v2/models/x/infer", b"application/json", {"error"}),
    ],
)
def test_a_malformed_body_is_answered_as_its_route_does(
    echo: Echoing, path: bytes, media_type: bytes, fields: set[str]
) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nX-Request-ID: mine\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    received, _, body = echo.ask(head + b"0x5\r\n").partition(b"\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"\r\ncontent-type: %b\r\n" % media_type in received
    assert b"\r\nx-request-id: mine\r\n" in received
    assert set(json.loads(body)) == fields
