import asyncio
import importlib
import json
import math
import pkgutil
import subprocess
import sys
from typing import Annotated

import httpx
import orjson
import pytest
from fastapi import Body, FastAPI

import fxcore
from fxcore.errors import FxError, UnknownNode
from service.client import exceptions
from service.http import problem_responses
from service.http.problem_responses import error_response
from service.problems import FIELDS, AdmissionFull, BackendRefused, NotFound, Problem
from service.schemas.problem_examples import EXAMPLES
from service.schemas.problems import documented, problem

INVALID_REQUESTS = {
    *("BadArgument", "BadPattern", "NotAFunction", "NotAGraph", "NotAModule", "NotInvertible", "UnknownArgument"),
    *("BadUserModel", "GraphDiffers", "UnknownFormat"),
    *("CannotQuantize", "Incomparable", "LoweringFailed", "NoPhotographs"),
}
"""Errors of fxcore without a problem of their own: of callers of the library, of an operator's own models and a
command's formats, and those that the service catches."""


def subclasses(base):
    """Errors of fxcore and the service, except those of whole folders."""
    found = {c for c in base.__subclasses__() if c.__module__.startswith(("fxcore.", "service."))}
    found = {c for c in found if not c.__module__.startswith("service.offline.")}
    return found.union(*(subclasses(c) for c in found))


def test_every_error_of_fxcore_is_a_problem_of_its_name():
    """Any other becomes an invalid request without a word, so it must be listed."""
    for module in pkgutil.walk_packages(fxcore.__path__, "fxcore."):
        importlib.import_module(module.name)
    slugs = {kind.__name__: problem(kind("x"))["type"].removeprefix("/problems/") for kind in subclasses(FxError)}
    assert {"BadImage", "BadEdit", "OpenCut", "CannotKeep"} < slugs.keys()
    unnamed = {name for name, slug in slugs.items() if Problem.kinds[slug].__name__ != name}
    assert unnamed == INVALID_REQUESTS


def test_every_problem_has_an_example():
    assert set(EXAMPLES) == set(Problem.kinds.values())


def test_what_the_client_receives_is_what_the_server_sent():
    sent = problem(AdmissionFull("full", retry_after=2.0))
    error = exceptions.problem_of(429, sent, "id")
    assert (error.type, error.title, error.status, error.detail) == tuple(sent[name] for name in FIELDS)
    assert (error.extra, error.request_id, str(error)) == ({"retry_after": 2.0}, "id", "full")


def test_problems_and_the_client_load_no_framework():
    code = "import sys, service.client, service.problems; print({'torch', 'fastapi', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


class SomethingElse(FxError):
    """As a library on top of fxcore may raise."""


@pytest.mark.parametrize(
    ("error", "more", "kind", "title"),
    [
        (UnknownNode, {"name": "x", "suggestions": ["y"]}, "unknown-node", "Unknown node"),
        (SomethingElse, {"why": "because"}, "invalid-request", "Invalid request"),
    ],
)
def test_problem_document(error, more, kind, title):
    """An error that has a field of the document's own does not change the document's."""
    document = problem(error("no", status=200, **more))
    assert document == {"type": f"/problems/{kind}", "title": title, "status": 422, "detail": "no", **more}


@pytest.mark.parametrize(
    ("path", "v2"), [("/v1/x", False), ("/v2", True), ("/v2/x", True), ("/v22", False), ("/", False)]
)
def test_each_part_says_errors_its_way(path, v2):
    response = error_response(path, NotFound("nothing \ud800 here"))
    document = json.loads(response.body)
    assert response.status_code == 404
    assert response.media_type == ("application/json" if v2 else "application/problem+json")
    assert (document.keys() == {"error"}) == v2


def test_numbers_that_json_has_not_are_null():
    """A backend whose answers hold NaN is refused with an error that is infinite."""
    error = BackendRefused(
        "it gave NaN", "openvino", "ask for eager", max_rel_error=math.inf, outputs=[{"a": math.nan}, {"a": 0.5}]
    )
    document = orjson.loads(error_response("/v1/x", error).body)
    assert document["max_rel_error"] is None
    assert document["outputs"] == [{"a": None}, {"a": 0.5}]


@pytest.mark.parametrize(("seconds", "header"), [(0.01, "1"), (1.0, "1"), (1.2, "2")])
def test_retry_after_is_whole_seconds(seconds, header):
    assert error_response("/v1", AdmissionFull("full", seconds)).headers["retry-after"] == header


def test_documented_groups_by_status():
    responses = documented(*(Problem.kinds[slug] for slug in ("unknown-node", "bad-image", "admission-full")))
    assert set(responses) == {422, 429}
    examples = responses[422]["content"]["application/problem+json"]["examples"]
    assert set(examples) == {"unknown-node", "bad-image"}
    assert examples["bad-image"]["value"]["index"] == 1


def send(method, path, **options):
    app = FastAPI()
    problem_responses.install(app)

    @app.post("/v1/things/{size}")
    async def things(size: int, names: Annotated[list[str], Body(embed=True)], limit: int = 1) -> None: ...

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.request(method, path, **options)

    response = asyncio.run(ask())
    assert response.headers["content-type"] == "application/problem+json"
    return response.json()


@pytest.mark.parametrize(
    ("options", "path", "detail", "fields"),
    [
        ({"json": {"names": []}}, "/v1/things/x", "path parameter 'size': ", ["size"]),
        ({"json": {"names": []}}, "/v1/things/1?limit=x", "query parameter 'limit': ", ["limit"]),
        ({"content": b"{"}, "/v1/things/1", "the body: not valid JSON: ", [""]),
        ({"content": b"[" * 100_000}, "/v1/things/1", "the body cannot be parsed", None),
        ({"json": {"names": 3}}, "/v1/things/1", "field 'names': ", ["names"]),
        ({"json": {"names": ["a", 3]}}, "/v1/things/1", "field 'names.1': ", ["names.1"]),
    ],
)
def test_invalid_requests_say_what_would_be_right(options, path, detail, fields):
    document = send("POST", path, headers={"content-type": "application/json"}, **options)
    assert document["status"] == 422
    assert document["type"] == "/problems/invalid-request"
    assert detail in document["detail"]
    if fields is not None:
        assert [error["field"] for error in document["errors"]] == fields


def test_routes_and_methods_that_are_not():
    assert send("GET", "/v1/nothing")["type"] == "/problems/not-found"
    assert send("DELETE", "/v1/things/1")["type"] == "/problems/method-not-allowed"
