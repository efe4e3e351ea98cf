"""The declaration of a route is found before the request is routed."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from service.http.routing.declared import Declared, DeclaredRoutes, declares
from service.problems import UnknownModel


def endpoint(request: object) -> None:
    """Answer nothing: requests are not routed here."""


def routes() -> DeclaredRoutes:
    def other(request: object) -> None: ...

    return DeclaredRoutes(
        [
            Route("/things/{thing}", declares("read", UnknownModel, body="images")(endpoint), methods=["POST"]),
            Route("/healthz", declares("open")(other), methods=["GET"]),
        ]
    )


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/things/x", Declared("read", (UnknownModel,), "images")),
        ("GET", "/things/x", Declared("read")),
        ("DELETE", "/things/x", Declared("admin")),
        ("POST", "/things/x/y", Declared("admin")),
        ("POST", "/v1/nothing/features", Declared("admin")),
        ("GET", "/healthz", Declared("open")),
        ("POST", "/healthz", Declared("open")),
        ("GET", "/healthz/", Declared("read")),
    ],
)
def test_a_request_is_of_its_route(method: str, path: str, expected: Declared) -> None:
    for root in ("", "/behind/a/proxy"):
        assert routes().find({"method": method, "path": root + path, "root_path": root}) == expected


def test_a_route_that_declares_nothing_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="/things declares nothing"):
        DeclaredRoutes([Route("/things", lambda request: None)])
