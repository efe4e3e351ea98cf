"""Limits that need a real socket, and that the next request is served."""

import contextlib
import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import connection_problem, response_of, until
from tests.e2e.slow_models import SWITCH, slow_models
from tests.wire import JPEG, b64, images, refused, sent

FEATURES = "/v1/models/resnet18/features?weights=random&nodes=C4,C5"
SLOW = "/v1/models/slow/features?nodes=stem&pool=avg"
BUILT_SLOWLY = ("late1", "late2", "late3")

MAX_BODY = 300_000


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    times = {"slow": "image = 100", "paced": "image = 0.6"}
    return slow_models(folder, **times, **dict.fromkeys(BUILT_SLOWLY, "build = 100"))


@pytest.fixture(scope="module")
def held(models):
    """A block within which ``slow`` is not computed, and ``BUILT_SLOWLY`` are not built."""

    @contextlib.contextmanager
    def hold():
        (models / SWITCH).touch()
        try:
            yield
        finally:
            (models / SWITCH).unlink()

    return hold


@pytest.fixture(scope="module")
def small(start, models):
    """A server with low limits."""
    limits = {"max_body_bytes": MAX_BODY, "max_pixels": 200_000, "max_response_bytes": 1_000_000, "max_inflight": 1}
    return start(models_dir=models, **limits)


@pytest.fixture(scope="module")
def slow(small, photos):
    """The files of a request whose model is loaded."""
    photo = ("a.jpg", photos["chelsea"], "image/jpeg")
    assert small.http.post(SLOW, files={"a": photo}).status_code == 200
    return [("a", photo)] * 6


@pytest.fixture(autouse=True)
def _the_next_request_is_served(small, photos):
    yield

    def status():
        return small.http.post(f"{FEATURES}&pool=avg", content=photos["chelsea"], headers=JPEG).status_code

    # What a test left behind may still hold the one place.
    assert until(lambda: (found := status()) != 429 and found) == 200


def test_body_over_the_limit(small):
    response = small.http.post(FEATURES, content=b"x" * (MAX_BODY + 1), headers=JPEG)
    assert refused(response, "body-too-large", status=413)["limit"] == MAX_BODY
    large = b"x" * (MAX_BODY + 1)
    response = small.http.post("/v1/extractors", content=large, headers={"content-type": "application/json"})
    refused(response, "body-too-large", status=413)
    refused(small.http.post(FEATURES, **sent(b"x" * 30_000_000)), "body-too-large", status=413)


def _head(length_header, path=FEATURES):
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n{length_header}\r\n\r\n").encode()


def test_declared_body_over_the_limit_is_refused_before_it_is_sent(small):
    with small.connect() as connection:
        connection.sendall(_head("Content-Length: 1000000000000"))
        first = connection.recv(65536)
        assert first.startswith(b"HTTP/1.1 413 ")  # not 408, which is what one gets that was waited for
        while connection.recv(65536):  # and the server closes, without a reset
            pass


@pytest.mark.parametrize("path", [FEATURES, "/v1/extractors"])
def test_chunked_body_over_the_limit_is_read_no_further(small, path):
    chunk = b"%x\r\n" % 65536 + b"x" * 65536 + b"\r\n"
    sent = 0
    with small.connect() as connection:
        head = _head("Transfer-Encoding: chunked", path)
        if path == "/v1/extractors":
            head = head.replace(b"image/jpeg", b"application/json")
        connection.sendall(head)
        try:
            while sent < 500 * 1024**2:
                connection.sendall(chunk)
                sent += len(chunk)
        except ConnectionError:
            pass
        assert sent < 50 * 1024**2  # what the sockets' own buffers hold, and little more
        received = response_of(connection)
    assert received.startswith(b"HTTP/1.1 413 ") or not received


def test_chunked_body_a_little_over_the_limit_gets_its_response(small):
    response = small.http.post(FEATURES, content=iter([b"x" * 100_000] * 4), headers=JPEG)
    refused(response, "body-too-large", status=413)


def test_a_chunked_body_gives_what_a_whole_one_does(small, photos):
    url, photo = f"{FEATURES}&pool=avg", photos["chelsea"]
    chunked, whole = (
        small.http.post(url, content=body, headers=JPEG) for body in (iter([photo[:1000], photo[1000:]]), photo)
    )
    assert chunked.json()["outputs"] == whole.json()["outputs"]


def busy(server):
    return server.metric("fxserve_inflight_requests ") == 1


def test_admission_full(small, slow, held):
    with ThreadPoolExecutor() as pool, held():
        first = pool.submit(small.http.post, SLOW, files=slow)
        until(lambda: busy(small))
        second = small.http.post(SLOW, files=slow[:1])
    refused(second, "admission-full", status=429)
    assert int(second.headers["retry-after"]) >= 1
    assert first.result().status_code == 200


@pytest.mark.exhaustive
def test_an_image_that_would_take_far_longer_than_its_deadline(small, photos, held):
    """It is refused at once, and others are served meanwhile."""
    path = "/v1/models/paced/features?nodes=stem&pool=avg"
    options = sent(photos["chelsea"], **{"x-request-timeout": "15"})
    with held():
        answers = [small.http.post(path + size, **options) for size in ("", "", "", "&image_size=2048", "")]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 504, 200]
    refused(answers[3], "deadline-exceeded", "3 x 2048 x 2048 would take about", status=504)


def test_a_disconnect_cancels_the_requests_work(small, slow, held):
    """A request ends when its client leaves, not when the work is done, and the one place is free for the next."""
    gone = 'fxserve_requests_total{method="POST",route="/v1/models/{model}/features",status="499"}'
    before = small.metric(gone)
    boundary, body = b"b", b""
    for _, (name, data, kind) in slow:
        body += b"--b\r\nContent-Disposition: form-data; name=a; filename=" + name.encode() + b"\r\n"
        body += b"Content-Type: " + kind.encode() + b"\r\n\r\n" + data + b"\r\n"
    body += b"--b--\r\n"
    head = _head(f"Content-Length: {len(body)}", SLOW).replace(
        b"image/jpeg", b"multipart/form-data; boundary=" + boundary
    )
    for left in range(1, 4):
        with held():
            with small.connect() as connection:
                connection.sendall(head + body)
                until(lambda: busy(small))
            until(lambda expected=before + left: small.metric(gone) >= expected)
        assert small.metric(gone) == before + left
    assert "Traceback" not in small.log.read_text()


@pytest.mark.parametrize(
    ("model", "route", "kind"),
    [
        ("late1", "/v1/embeddings", "application/json"),
        ("late2", "/v1/models/{model}/features", "application/json"),
        ("late3", "/v1/models/{model}/features", "image/jpeg"),
    ],
)
def test_a_disconnect_while_the_extractor_is_built_ends_the_request(small, photos, held, model, route, kind):
    gone = f'fxserve_requests_total{{method="POST",route="{route}",status="499"}}'
    before = small.metric(gone)
    path = route.replace("{model}", model)
    if route == "/v1/embeddings":
        body = json.dumps({"model": f"{model}:stem", "input": b64(photos["chelsea"])}).encode()
    else:
        path += "?nodes=stem"
        body = json.dumps(images([photos["chelsea"]])).encode() if kind == "application/json" else photos["chelsea"]
    head = _head(f"Content-Length: {len(body)}", path).replace(b"image/jpeg", kind.encode())

    def states():
        return [one["state"] for one in small.http.get("/v1/extractors").json()["extractors"] if one["model"] == model]

    with held():
        with small.connect() as connection:
            connection.sendall(head + body)
            until(states)
        until(lambda: small.metric(gone) == before + 1)


def test_a_client_disconnects_while_sending(small):
    connection = small.connect()
    connection.sendall(_head("Content-Length: 100000") + b"x" * 1000)
    time.sleep(0.1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()  # with a reset
    assert small.http.get("/healthz").status_code == 200
    assert "Traceback" not in small.log.read_text()


@pytest.mark.exhaustive
def test_a_client_amid_a_head_gets_a_503_at_shutdown(start):
    server = start()
    with server.connect() as kept:
        kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1/extr")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200 ")  # so the server has read what follows, too
        server.process.send_signal(signal.SIGTERM)
        ended = response_of(kept)
    ended = ended[ended.index(b"HTTP/1.1 503 ") :]  # the rest of the first answer may come before
    assert int(connection_problem(ended, 503, "draining")["retry-after"]) >= 1
    server.process.wait(60)


@pytest.mark.exhaustive
def test_what_waits_for_its_extractor_at_the_end_of_the_grace_period(start, models, held):
    server = start(models_dir=models, grace_period=0.5)
    spec = {"model": BUILT_SLOWLY[0], "return_nodes": ["stem"]}
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=server.url, timeout=60) as other, held():
        waits = pool.submit(server.http.post, "/v1/extractors?wait=300", json=spec)
        until(lambda: other.get("/v1/extractors").json()["extractors"])
        server.process.send_signal(signal.SIGTERM)
        response = waits.result()
    refused(response, "draining", status=503)
    assert response.headers["x-request-id"]
    assert int(response.headers["retry-after"]) >= 1
    server.process.wait(60)
