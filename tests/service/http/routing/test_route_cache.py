"""Parameters are validated once for each path, query and timeout, and never mixed up."""

from __future__ import annotations

from typing import Annotated

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from pydantic import BaseModel, field_validator
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http import problem_responses
from service.http.routing.route_cache import RouteCache, StrictCachedRoute
from service.observability.metrics import route_template
from service.problems import NotAcceptable

pytestmark = pytest.mark.anyio

validated: list[str] = []
routes: list[str] = []


class Routes:
    """Notes the route of each request, as metrics do."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
        routes.append(route_template(scope))


class Asked(BaseModel):
    word: str = "none"

    @field_validator("word")
    @classmethod
    def _seen(cls, value: str) -> str:
        validated.append(value)
        return value


@pytest.fixture
def client() -> httpx.AsyncClient:
    validated.clear()
    routes.clear()
    router = APIRouter(prefix="/v1", route_class=StrictCachedRoute)

    @router.post("/{place}")
    async def respond(
        request: Request,
        place: Annotated[str, Path(max_length=5)],
        asked: Annotated[Asked, Query()],
        timeout: Annotated[float | None, Header(alias="X-Request-Timeout", gt=0)] = None,
    ) -> Response:
        body = (await request.body()).decode()
        if body == "refused":
            raise NotAcceptable("this is refused")
        return Response(f"{place} {asked.word} {timeout} {body}")

    app = FastAPI()
    app.include_router(router)
    problem_responses.install(app)
    app.add_middleware(RouteCache)
    app.add_middleware(Routes)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


async def test_every_request_gets_its_own_parameters(client: httpx.AsyncClient) -> None:
    for body in ("first", "second"):
        for place in ("here", "there"):
            for word in ("yes", "no"):
                for timeout in ("1", "2.5"):
                    headers = {"X-Request-Timeout": timeout}
                    url = f"/v1/{place}?word={word}"
                    response = await client.post(url, headers=headers, content=body)
                    assert response.text == f"{place} {word} {float(timeout)} {body}"
    assert (await client.post("/v1/here", content="x")).text == "here none None x"
    assert sorted(validated) == ["no"] * 4 + ["yes"] * 4


async def test_what_is_refused_is_refused_again(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        assert (await client.post("/v1/far-away?word=yes")).status_code == 422
        assert (await client.post("/v1/here?word=yes", headers={"X-Request-Timeout": "-1"})).status_code == 422
        assert (await client.post("/v1/here?word=yes")).text == "here yes None "


async def test_memory_is_bounded(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.routing.route_cache._MAX_ENTRIES", 2)
    for _ in range(2):
        for word in ("a", "b", "c"):
            assert (await client.post(f"/v1/here?word={word}")).text == f"here {word} None "
    assert len(validated) > 3
    validated.clear()
    for _ in range(2):
        await client.post("/v1/here", params={"word": "long" * 1000})
    assert len(validated) == 2
    for _ in range(2):
        timeout = {"X-Request-Timeout": f"1.{'0' * 5000}"}
        assert (await client.post("/v1/here?word=d", headers=timeout)).text == "here d 1.0 "
    assert len(validated) == 4


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
