import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from service.engine import Engine
from service.engine.requests.admission.admission import Admission, Reservation
from service.http.access import keys
from service.http.access.hosts import Hosts
from service.http.middleware.access import Access
from service.http.middleware.body_limit import LINGER_BYTES, MAX_OTHER_BYTES, BodyLimit
from service.http.middleware.request_context import RequestContext, request_id
from service.http.routing.declared import DeclaredRoutes, declares
from service.observability.logs import JsonLines, TextLines
from service.settings import Settings


def scope(**headers):
    raw = [(key.replace("_", "-").encode(), value.encode("latin-1")) for key, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/v1/x", "headers": raw, "query_string": b""}


def call(app, scope, chunks=(b"",), left=None):
    """Run an ASGI app; its messages, and how many chunks of the body it took. The client leaves after ``left()``."""
    waiting = [{"type": "http.request", "body": c, "more_body": i + 1 < len(chunks)} for i, c in enumerate(chunks)]
    taken, sent = 0, []

    async def receive():
        nonlocal taken
        if taken < len(waiting):
            taken += 1
            return waiting[taken - 1]
        if left is not None:
            await left()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent, taken


async def echo(scope, receive, send):
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"{len(body)}")(scope, receive, send)


ROUTES = DeclaredRoutes(
    [
        Route("/v1/models/{model}/features", declares("read", body="images")(echo), methods=["POST"]),
        Route("/v1/extractors", declares("admin")(lambda request: None), methods=["POST"]),
    ]
)


ENGINE = Engine(Settings())


def limited(app, timeout=60.0, admission=None):
    return BodyLimit(app, ROUTES, 10, timeout, admission or Admission(10, 1000))


def headers(sent):
    return {key.decode(): value.decode() for key, value in sent[0]["headers"]}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("abc-123", "abc-123"),
        ("|a1.b2~, #{(;", "|a1.b2~, #{(;"),
        ("job 7: \"cats\" \\ 'dogs'", "job 7: \"cats\" \\ 'dogs'"),
        ("a\nb\r\n\tc é\x7fd\x1b", "abc d"),
        ("x" * 500, "x" * 128),
    ],
)
def test_request_id_is_echoed_without_what_could_harm(sent, expected):
    assert request_id(sent) == expected
    messages, _ = call(RequestContext(echo, ENGINE), scope(x_request_id=sent))
    assert headers(messages)["x-request-id"] == expected


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models/resnet50/features", 200), ("/v1/extractors", 403)], ids=["served", "refused"]
)
def test_the_access_log_names_the_key_and_never_shows_it(path, status, tmp_path, caplog):
    created, secret = keys.make("alice", "read")
    (tmp_path / "keys").write_text(created.line)
    app = RequestContext(Access(echo, ENGINE, ROUTES, keys.Keys(tmp_path / "keys"), Hosts(())), ENGINE)
    caplog.set_level("INFO", "fxserve.access")
    messages, _ = call(app, {**scope(authorization=f"Bearer {secret}"), "path": path, "client": ("10.0.0.7", 1)})
    assert messages[0]["status"] == status
    [record] = caplog.records
    assert record.getMessage().endswith(" ms from 10.0.0.7 with key alice")
    assert record.fields["key"] == "alice"
    assert secret not in TextLines().format(record) + JsonLines().format(record)


def test_the_access_log_of_a_request_without_a_key(caplog):
    caplog.set_level("INFO", "fxserve.access")
    call(RequestContext(echo, ENGINE), scope())
    [record] = caplog.records
    assert record.getMessage().endswith(" ms")
    assert record.fields["key"] is None


@pytest.mark.parametrize("sent", [None, "", "\n\r "])
def test_request_id_is_made(sent):
    assert len(request_id(sent)) == 32
    assert request_id(sent) != request_id(sent)


def test_an_unhandled_error_gives_a_problem_without_a_traceback(caplog):
    async def broken(scope, receive, send):
        raise ValueError("a secret")

    messages, _ = call(RequestContext(broken, ENGINE), scope())
    assert messages[0]["status"] == 500
    assert b"/problems/internal" in messages[1]["body"]
    assert b"secret" not in messages[1]["body"]
    assert "a secret" in caplog.text
    assert "x-request-id" in headers(messages)


def test_an_error_after_the_response_started_closes_the_connection():
    async def broken(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        call(RequestContext(broken, ENGINE), scope())


def test_a_client_disconnect_is_no_server_error(caplog):
    async def left(scope, receive, send):
        raise ClientDisconnect

    engine = Engine(Settings())
    messages, _ = call(RequestContext(left, engine), scope())
    assert messages == []
    assert caplog.text == ""
    assert b'status="499"' in engine.metrics.text()


def test_a_body_at_the_limit_passes():
    messages, _ = call(limited(echo), scope(content_length="10"), [b"12345", b"67890"])
    assert messages[0]["status"] == 200
    assert messages[1]["body"] == b"10"


def test_a_declared_body_over_the_limit_is_not_read():
    async def never(scope, receive, send):
        pytest.fail("the app was called")

    messages, _ = call(limited(never), scope(content_length="11"), [])
    assert messages[0]["status"] == 413
    assert headers(messages)["connection"] == "close"
    assert b"/problems/body-too-large" in messages[1]["body"]


@pytest.mark.parametrize("swallow", [False, True])
def test_a_streamed_body_over_the_limit_is_cut_off(swallow):
    """Also where the app makes an answer of its own out of the failure to read, as FastAPI does."""
    read = []

    async def reader(scope, receive, send):
        try:
            async for chunk in Request(scope, receive).stream():
                read.append(chunk)
        except Exception:
            if not swallow:
                raise
            await PlainTextResponse("an answer of the app's own", 400)(scope, receive, send)

    messages, _ = call(limited(reader), scope(), [b"123456"] * 1000)
    assert messages[0]["status"] == 413
    assert sum(m["type"] == "http.response.start" for m in messages) == 1
    assert read == [b"123456"]


def test_lingering_ends():
    """A client that never stops sending is thrown out."""
    _, taken = call(limited(echo), scope(), [b"x" * 65536] * 1000)
    assert taken < LINGER_BYTES / 65536 + 30


def test_a_lingering_client_holds_no_reservation():
    admission, held = Admission(10, 1000), []

    async def answered(message):
        held.append(admission.bytes)

    bodies = iter([b"123456", b"123456", b"more", b""])

    async def receive():
        body = next(bodies)
        return {"type": "http.request", "body": body, "more_body": bool(body)}

    asyncio.run(limited(echo, admission=admission)(scope(), receive, answered))
    assert held == [0, 0, 0]


@pytest.mark.parametrize("path", ["/v1/extractors", "/v2/repository/models/x/load", "/v1/nothing"])
def test_only_images_may_be_large(path):
    limit = MAX_OTHER_BYTES + 10
    app = BodyLimit(echo, ROUTES, limit, 60.0, Admission(10, 100 * limit))
    messages, _ = call(app, scope(content_length=str(limit)) | {"path": path}, [])
    assert messages[0]["status"] == 413
    messages, _ = call(app, scope() | {"path": path}, [bytes(limit - 20), b"x" * 20])
    assert messages[0]["status"] == 413
    messages, _ = call(app, scope() | {"path": "/v1/models/x/features"}, [bytes(limit - 20), b"x" * 20])
    assert messages[0]["status"] == 200


def test_a_stalled_body_times_out():
    """Also where the app makes an answer of its own out of it."""
    sent, _ = call(limited(echo, timeout=0.01), scope(), [], left=lambda: asyncio.Event().wait())
    assert sent[0]["status"] == 408
    assert b"/problems/request-timeout" in sent[1]["body"]
    assert headers(sent)["connection"] == "close"


def test_waiting_for_the_client_to_leave_is_not_waiting_for_its_body():
    async def patient(scope, receive, send):
        request = Request(scope, receive)
        await request.body()
        assert (await request.receive())["type"] == "http.disconnect"
        await PlainTextResponse("left")(scope, receive, send)

    sent, _ = call(limited(patient, timeout=0.01), scope(), [b"x"], left=lambda: asyncio.sleep(0.05))
    assert sent[0]["status"] == 200


def test_bodies_count_towards_admission_until_the_response_is_sent():
    admission = Admission(10, 15)
    held = []

    async def app(scope, receive, send):
        await Request(scope, receive).body()
        held.append(admission.bytes)
        await PlainTextResponse("")(scope, receive, send)
        held.append(admission.bytes)

    call(limited(app, admission=admission), scope(), [b"12345", b"678"])
    assert held == [8, 8]
    assert admission.bytes == 0
    with Reservation(admission, "another") as another:
        another.claim(10)
        messages, _ = call(limited(app, admission=admission), scope(), [b"12345", b"678"])
        assert messages[0]["status"] == 429
        assert int(headers(messages)["retry-after"]) >= 1
    assert admission.bytes == 0
