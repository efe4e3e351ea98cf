"""Strict routes: unknown query parameters are refused, so that a typo is not ignored silently, and so are other bodies
than JSON."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel

from service.codecs.negotiation import essence
from service.codecs.requests import bodies
from service.http.scope import header, joined_header
from service.problems import InvalidRequest, Problem
from service.schemas.strict import expected


class StrictRoute(APIRoute):
    """A route that refuses unknown and repeated query parameters, and bodies that FastAPI would not parse as JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = sorted(_names(self.dependant))

        async def respond(request: Request) -> Response:
            if request.scope["query_string"]:
                check_query(request.query_params.multi_items(), known)
            if self.body_field is not None:
                _check_json(request)
            return await handle(request)

        return respond


def _check_json(request: Request) -> None:
    """Check that a body is JSON, unencoded; browser forms, for example, are refused.

    Raises:
        UnsupportedMediaType: it is not.
    """
    kind = essence(header(request.scope, b"content-type"))
    if kind.startswith("application/") and kind.endswith("+json"):
        kind = "application/json"
    bodies.check(kind, joined_header(request.scope, b"content-encoding"), ("application/json",))


def _names(dependant: Dependant) -> Iterator[str]:
    """Yield the query parameters of a route and of its dependencies."""
    for field in dependant.query_params:
        kind = field.field_info.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield from (info.alias or name for name, info in kind.model_fields.items())
        else:
            yield field.alias
    for dependency in dependant.dependencies:
        yield from _names(dependency)


def check_query(items: Iterable[tuple[str, str]], known: list[str]) -> None:
    """Check the parameters of a query.

    Raises:
        InvalidRequest: one is not ``known``, or is given twice.
    """
    given = Counter(name for name, _ in items)
    for name, times in given.items():
        if name not in known:
            right = expected(name, known) if known else "this route takes none"
            raise _refusal(name, f"unknown parameter, {right}", known)
        if times > 1:
            raise _refusal(name, f"given {times} times; give it once", known)


def _refusal(name: str, message: str, known: list[str]) -> Problem:
    shown = name[:64]
    errors = [{"in": "query", "field": shown, "message": message}]
    return InvalidRequest(f"query parameter {shown!r}: {message}", errors=errors, known=known)
