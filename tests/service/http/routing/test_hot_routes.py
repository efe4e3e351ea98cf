"""Hot routes parse their parameters as FastAPI would, and never mix up those of two requests."""

from __future__ import annotations

import threading
import time
from typing import Annotated

import httpx
import pytest
from fastapi import FastAPI, Header, Path, Query
from pydantic import BaseModel, Field, field_validator
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.engine import Engine
from service.engine.requests.admission.admission import Reservation
from service.http import problem_responses
from service.http.routing.hot_requests import HotRequest
from service.http.routing.hot_routes import AnyQuery, HotRoute, Parameters
from service.http.scope import RESERVATION
from service.http.state import State
from service.observability.metrics import route_template
from service.problems import NotAcceptable
from service.settings import Settings

pytestmark = pytest.mark.anyio

validated: list[str] = []
routes: list[str] = []


class Routes:
    """Notes the route of each request, as metrics do, and reserves its bytes."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RESERVATION] = Reservation(self.engine.admission, "")
        await self.app(scope, receive, send)
        routes.append(route_template(scope))


class Asked(BaseModel):
    word: str = "none"
    size: int | None = Field(default=None, ge=1)

    @field_validator("word")
    @classmethod
    def _seen(cls, value: str) -> str:
        validated.append(value)
        return value


Place = Annotated[str, Path(max_length=5)]


def serving(route: HotRoute) -> FastAPI:
    app, engine = FastAPI(), Engine(Settings())
    app.state.fxserve = State(engine)
    app.router.routes.append(route)
    problem_responses.install(app)
    app.add_middleware(Routes, engine=engine)
    return app


def to(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


@pytest.fixture
def client() -> httpx.AsyncClient:
    validated.clear()
    routes.clear()

    async def respond(request: HotRequest[Asked]) -> Response:
        body = (await request.body()).decode()
        if body == "refused":
            raise NotAcceptable("this is refused")
        quarters = round((request.deadline.at - time.monotonic()) / 15)  # of a minute
        return Response(f"{request.path_params['place']} {request.query.word} {quarters} {body}")

    app = serving(HotRoute("/v1/{place}", respond, Parameters(Asked, place=Place), "tag", {}, {}))

    @app.post("/fastapi/{place}")
    async def reference(
        place: Place,
        asked: Annotated[Asked, Query()],
        timeout: Annotated[float | None, Header(alias="X-Request-Timeout", gt=0, allow_inf_nan=False)] = None,
    ) -> None:
        """FastAPI's own route with the same parameters."""

    return to(app)


async def test_every_request_gets_its_own_parameters(client: httpx.AsyncClient) -> None:
    for body in ("first", "second"):
        for place in ("here", "there"):
            for word in ("yes", "no"):
                for quarters, timeout in enumerate(("15", "30.5"), 1):
                    headers = {"X-Request-Timeout": timeout}
                    url = f"/v1/{place}?word={word}"
                    response = await client.post(url, headers=headers, content=body)
                    assert response.text == f"{place} {word} {quarters} {body}"
    assert (await client.post("/v1/here", content="x")).text == "here none 4 x"
    assert sorted(validated) == ["no", "yes"]


async def test_what_is_refused_is_refused_again(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        assert (await client.post("/v1/far-away?word=yes")).status_code == 422
        assert (await client.post("/v1/here?word=yes", headers={"X-Request-Timeout": "-1"})).status_code == 422
        assert (await client.post("/v1/here?word=yes")).text == "here yes 4 "


@pytest.mark.parametrize(
    ("path", "timeout"),
    [
        ("here?size=0", "1"),
        ("here?size=x", "-1"),
        ("far-away?size=1.5", "nan"),
        ("far-away", "soon"),
        ("here", ""),
        ("here?size=", "inf"),
    ],
)
async def test_errors_are_those_of_fastapi(client: httpx.AsyncClient, path: str, timeout: str) -> None:
    headers = {"X-Request-Timeout": timeout}
    ours, reference = [await client.post(f"{root}/{path}", headers=headers) for root in ("/v1", "/fastapi")]
    assert ours.status_code == reference.status_code == 422
    assert ours.json() == reference.json()


async def test_unknown_and_repeated_parameters_are_refused(client: httpx.AsyncClient) -> None:
    unknown = await client.post("/v1/here?wrod=yes")
    assert unknown.json()["detail"].endswith("expected one of size, word; did you mean 'word'?")
    twice = await client.post("/v1/here?word=yes&word=no")
    assert "given 2 times" in twice.json()["detail"]


def test_a_query_of_others_is_ignored() -> None:
    scope = {"type": "http", "query_string": b"gateway=1&gateway=2", "path_params": {}, "headers": []}
    assert Parameters(AnyQuery).parse(scope) == (AnyQuery(), None)


async def test_long_queries_are_not_kept(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await client.post("/v1/here", params={"word": "long" * 1000})
    assert len(validated) == 2


async def test_what_is_remembered_is_of_one_method(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/here", content="x")).status_code == 200
    other = await client.get("/v1/here")
    assert other.status_code == 405
    assert other.headers["allow"] == "POST"


async def test_what_is_remembered_can_still_be_refused(client: httpx.AsyncClient) -> None:
    for body, status in (("first", 200), ("refused", 406), ("last", 200)):
        response = await client.post("/v1/here?word=yes", content=body)
        assert response.status_code == status
    refused = await client.post("/v1/here?word=yes", content="refused")
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["detail"] == "this is refused"
    assert validated == ["yes"]
    assert routes == ["/v1/{place}"] * 4


@pytest.mark.parametrize(("size", "threads"), [(2**19, 0), (2**21, 1)])
async def test_a_large_image_is_parsed_off_the_event_loop(size: int, threads: int) -> None:
    used: set[int] = set()

    def read(chunks: list[bytes]) -> bytes:
        used.add(threading.get_ident())
        return b"".join(chunks)

    async def respond(request: HotRequest[AnyQuery]) -> Response:
        request.check_body()
        return Response(await request.parse(read))

    app, sent = serving(HotRoute("/v1", respond, Parameters(AnyQuery), "tag", {}, {})), bytes(size)
    response = await to(app).post("/v1", content=sent, headers={"Content-Type": "image/jpeg"})
    assert response.content == sent
    assert len(used - {threading.get_ident()}) == threads
