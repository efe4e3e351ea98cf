"""What a web page in somebody's browser can make of a server without keys, over real sockets."""

import json

import pytest

SPEC = json.dumps({"model": "squeezenet1_1", "weights": "random", "return_nodes": ["features.2"]}).encode()
POST = b"POST %b HTTP/1.1\r\n%bContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"


def status(server, request):
    with server.connect() as connection, connection.makefile("rb") as response:
        connection.sendall(request)
        return int(response.read().split(b" ")[1])


@pytest.mark.parametrize("fetched_from", [b"", b"Sec-Fetch-Site: cross-site\r\n", b"Sec-Fetch-Site: same-origin\r\n"])
@pytest.mark.parametrize("path", [b"/v1/extractors", b"/v2/repository/models/squeezenet1_1/unload"])
def test_pages_of_other_origins_change_nothing(server, path, fetched_from):
    before = server.http.get("/v1/extractors").json()["extractors"]
    own = b"Host: 127.0.0.1:%d\r\n" % server.port
    for origin in (b"http://evil.example", b"null", b"http://127.0.0.1:1"):
        sent = own + b"Origin: " + origin + b"\r\n" + fetched_from
        assert status(server, POST % (path, sent, len(SPEC), SPEC)) == 403
    assert server.http.get("/v1/extractors").json()["extractors"] == before


def test_a_name_that_was_made_to_point_here(server):
    evil = b"Host: evil.example:%d\r\nOrigin: http://evil.example:%d\r\n" % (server.port, server.port)
    assert status(server, b"GET /v1/models HTTP/1.1\r\n" + evil + b"Connection: close\r\n\r\n") == 421
    assert status(server, b"GET /v1/models/ HTTP/1.1\r\n" + evil + b"Connection: close\r\n\r\n") == 421
    sent = evil + b"Sec-Fetch-Site: same-origin\r\n"
    assert status(server, POST % (b"/v1/extractors", sent, len(SPEC), SPEC)) == 421
