"""Clients that are slow, greedy, gone, or not who they say, over real sockets."""

import contextlib
import hashlib
import signal
import socket
import statistics
import threading
import time

import pytest

from tests.e2e.conftest import connection_problem, response_of, until
from tests.e2e.slow_models import SWITCH, slow_models
from tests.wire import JPEG, sent

FEATURES = "/v1/models/squeezenet1_1/features?weights=random&nodes=features&pool=avg"
SLOW = "/v1/models/resnet50/features?weights=random&nodes=C5&pool=avg"

COMPUTED = "fxserve_batch_size_sum"  # rows
SERVED = 'fxserve_requests_total{method="POST",route="/v1/models/{model}/features",status="200"}'
INFLIGHT = "fxserve_inflight_requests "


def line(name, scope, secret):
    return f"{name}:{scope}:{hashlib.sha256(secret.encode()).hexdigest()}\n"


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(line("greedy", "admin", "one") + line("modest", "read", "two"))
    return file


@pytest.fixture(scope="module")
def guarded(start, keys):
    """A server with keys, little memory and little patience."""
    limits = {"max_body_bytes": 4_000_000, "max_inflight_bytes": 80_000_000, "max_inflight": 24, "max_batch": 2}
    return start(api_keys_file=keys, body_timeout=3, **limits)


def request(path, *headers, length=None):
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: image/jpeg", "Authorization: Bearer one", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def test_keys_are_read_again_on_sighup(guarded, keys):
    assert guarded.http.get("/v1/models").status_code == 401
    assert guarded.http.get("/v1/models", headers=bearer("two")).status_code == 200
    assert guarded.http.get("/v1/models", headers=bearer("three")).status_code == 401
    with keys.open("a") as file:
        file.write(line("new", "read", "three"))
    guarded.process.send_signal(signal.SIGHUP)
    until(lambda: guarded.http.get("/v1/models", headers=bearer("three")).status_code == 200)
    assert guarded.http.get("/v1/models", headers=bearer("one")).status_code == 200


@pytest.mark.exhaustive
def test_stalled_bodies_get_a_408(guarded):
    """All at once, because it takes the server's patience."""
    paths = [FEATURES, "/v1/extractors", "/v2/repository/index", "/v2/models/resnet18/infer"]
    waiting = []
    for path in paths:
        waiting.append(guarded.connect())
        head = request(path, length=100_000).replace(
            b"image/jpeg", b"image/jpeg" if path == FEATURES else b"application/json"
        )
        waiting[-1].sendall(head + b" " * 1000)
    for path, connection in zip(paths, waiting, strict=True):
        with connection:
            received = response_of(connection)  # and the server closes
        assert received.startswith(b"HTTP/1.1 408 "), path
        assert (b'{"error"' if path.startswith("/v2") else b"/problems/request-timeout") in received, path


@pytest.mark.exhaustive
def test_endless_bodies_stay_within_the_memory_limit(guarded, photos):
    """Four megabytes each, eighty together: those that do not fit are told so, and others are served meanwhile.

    A photo takes seven megabytes, and a ninth of the eighty is kept for others.
    """
    guarded.http.post(FEATURES, **sent(photos["chelsea"], **bearer("one")))
    connections = [guarded.connect() for _ in range(30)]
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(request(FEATURES, length=4_000_000) + b"x" * 3_900_000)
    response = guarded.http.post(FEATURES, **sent(photos["chelsea"], **bearer("two")))
    assert response.status_code == 200, response.text
    statuses = [response_of(connection)[9:12] for connection in connections]
    for connection in connections:
        connection.close()
    assert set(statuses) == {b"408", b"429"}


@pytest.mark.exhaustive
def test_stalled_clients_time_out(guarded, photos):
    """Heads that do not end, and an answer that nobody reads; all at once, because it takes the server's patience."""

    def answered():
        return guarded.metric(SERVED, headers=bearer("one"))

    heads = [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX-A: "]
    waiting = []
    for head in heads:
        waiting.append(guarded.connect())
        waiting[-1].sendall(head)
    large = FEATURES.replace("features&pool=avg", "features.0")
    body = b"".join(
        b"--b\r\nContent-Disposition: form-data; name=a; filename=a\r\n\r\n" + photos["chelsea"] + b"\r\n"
        for _ in range(4)
    )
    body += b"--b--\r\n"
    before = answered()
    assert guarded.http.post(large, content=photos["chelsea"], headers=JPEG | bearer("one")).status_code == 200
    unread = guarded.connect()
    head = request(large, "Accept: application/x-safetensors", length=len(body))
    head = head.replace(b"image/jpeg", b"multipart/form-data; boundary=b")
    unread.sendall(head + body)
    received = [response_of(connection) for connection in waiting]
    assert received[0] == b""
    for response in received[1:]:
        connection_problem(response, 408, "request-timeout")
    until(lambda: answered() >= before + 2)  # the server's patience with this one began a little later
    response = response_of(unread)
    assert response.startswith(b"HTTP/1.1 200 ")
    length = int(response.partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert len(response) < length  # cut off
    for connection in [*waiting, unread]:
        connection.close()


@pytest.mark.parametrize("unit", [b"x", b"\r\nX-Some: header"])
def test_heads_without_end_are_not_kept(guarded, unit):
    with guarded.connect() as connection:
        sent = 0
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
            while sent < 200_000_000:
                connection.sendall(unit * (65536 // len(unit)))
                sent += 65536
        assert sent < 100_000_000  # what sockets buffer, which is tens of megabytes on some systems
        received = response_of(connection)
    # It went on sending whatever it was told, and the answer may have been lost to the reset that ended that.
    assert received.startswith(b"HTTP/1.1 431 ") or not received


def test_an_oversized_head_gets_a_431(guarded):
    """However much of it was sent before the client listens: what was not read would reset the connection."""
    with guarded.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 4_000_000)
        received = response_of(connection)
    connection_problem(received, 431, "head-too-large")


@pytest.mark.exhaustive
def test_a_client_that_asks_for_everything_at_once_leaves_room(start, keys, photos):
    """Eighty requests of one key at a time and no end of them; another key's few are all served, in a few rounds."""
    server = start(api_keys_file=keys, max_inflight=64, max_batch=2)
    headers = JPEG | bearer("one")
    assert server.http.post(FEATURES, content=photos["chelsea"], headers=headers).status_code == 200
    done = threading.Event()
    served, refused = [], []

    def flood():
        while not done.is_set():
            response = server.http.post(FEATURES, content=photos["chelsea"], headers=headers)
            if response.status_code == 200:
                served.append(response)
            else:
                refused.append(response)
                done.wait(0.05)  # or nobody in this process gets to see its answers

    threads = [threading.Thread(target=flood) for _ in range(80)]
    for thread in threads:
        thread.start()
    try:
        while not refused:
            time.sleep(0.01)
        between = []
        for _ in range(5):
            before = len(served)
            response = server.http.post(FEATURES, content=photos["chelsea"], headers=JPEG | bearer("two"))
            assert response.status_code == 200, response.text
            between.append(len(served) - before)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert {response.status_code for response in refused} == {429}
    assert int(refused[0].headers["retry-after"]) >= 1
    # The greedy client has 56 places or a few less. Of those, eight have their turn when a request comes, and one more
    # gets it in the round; what else is counted are answers that its threads had yet to see.
    assert statistics.median(between) <= 28, between
    assert len(server.http.get("/healthz").content) > 0


@pytest.mark.exhaustive
def test_two_hundred_clients_that_vanish(start, photos, tmp_path):
    """They send and are gone: at once, and again while their requests wait. Next to nothing is computed for them."""
    server = start(models_dir=slow_models(tmp_path, slow="image = 1000"), request_timeout=300)

    def ask(path):
        assert server.http.post(path, content=photos["chelsea"], headers=JPEG).status_code == 200

    slow, held = tmp_path / SWITCH, "/v1/models/slow/features?nodes=stem&pool=avg"
    head = request(SLOW, length=len(photos["chelsea"]))
    ask(held)
    ask(SLOW)
    for wait in (False, True):
        before = server.metric(COMPUTED)
        slow.touch()
        first = threading.Thread(target=ask, args=[held])
        first.start()
        until(lambda: server.metric(INFLIGHT) == 1)
        connections = []
        for _ in range(200):
            connections.append(server.connect())
            connections[-1].sendall(head + photos["chelsea"])
            if not wait:
                vanish(connections.pop())
        if wait:
            until(lambda: server.metric(INFLIGHT) > 100)
        for connection in connections:
            vanish(connection)
        until(lambda: server.metric(INFLIGHT) == 1)
        slow.unlink()
        first.join()
        ask(SLOW)
        assert server.metric(COMPUTED) - before - 2 < 0.05 * 200


def vanish(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()  # with a reset
