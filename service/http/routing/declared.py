"""Declarations of routes: access, kind of body, and errors.

Authorization, body limits and the OpenAPI document use the same declaration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from service.problems import Problem

Access = Literal["open", "read", "admin"]
Body = Literal["small", "images"]
Endpoint = TypeVar("Endpoint", bound=Callable[..., object])

READ_METHODS = frozenset(("GET", "OPTIONS"))

_ATTRIBUTE = "__fxserve_declared__"


@dataclass(frozen=True)
class Declared:
    """The declaration of a route.

    Attributes:
        access: who may send its requests: everyone, keys of any scope, or only those of scope admin.
        errors: problems that it may return, in addition to those of the middleware.
        body: ``images`` if bodies may hold images, ``small`` otherwise.
    """

    access: Access
    errors: tuple[type[Problem], ...] = ()
    body: Body = "small"


_OPEN, _READ, _WRITE = Declared("open"), Declared("read"), Declared("admin")


def declares(access: Access, *errors: type[Problem], body: Body = "small") -> Callable[[Endpoint], Endpoint]:
    """Declare the route of the decorated endpoint; see :class:`Declared`."""

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _ATTRIBUTE, Declared(access, errors, body))
        return endpoint

    return declare


class DeclaredRoutes:
    """Finds the declaration of a request's route before it is routed.

    Args:
        routes: all routes of the application.

    Raises:
        TypeError: a route declares nothing.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes: list[tuple[re.Pattern[str], frozenset[str], Declared]] = []
        for route in routes:
            assert isinstance(route, Route)
            declared = getattr(route.endpoint, _ATTRIBUTE, None)
            if declared is None:
                raise TypeError(f"the route {route.path} declares nothing")
            self._routes.append((route.path_regex, frozenset(route.methods or ()), declared))

    def find(self, scope: Scope) -> Declared:
        """Return the declaration of a request's route. Without a route, write requests need scope admin."""
        method, path = scope["method"], route_path(scope)
        other = _READ if method in READ_METHODS else _WRITE
        for regex, methods, declared in self._routes:
            if regex.match(path):
                if method in methods:
                    return declared
                if declared.access == "open":  # everyone may learn that the method is not allowed
                    other = _OPEN
        return other


def route_path(scope: Scope) -> str:
    """Return the path of a request as routes see it: below the path that the application is mounted under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
