"""Strict query strings: unknown parameters are refused, so that a typo is not ignored silently."""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel

from service.problems import InvalidRequest, Problem


class Route(APIRoute):
    """A route that refuses unknown and repeated query parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = sorted(_names(self.dependant))

        async def respond(request: Request) -> Response:
            if request.scope["query_string"]:
                check(request.query_params.multi_items(), known)
            return await handle(request)

        return respond


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


def check(items: Iterable[tuple[str, str]], known: list[str]) -> None:
    """Check the parameters of a query.

    Raises:
        InvalidRequest: one is not ``known``, or is given twice.
    """
    given = Counter(name for name, _ in items)
    for name, times in given.items():
        if name not in known:
            near = difflib.get_close_matches(name[:64], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            expected = f"expected one of {', '.join(known)}" if known else "this route takes none"
            raise _refusal(name, f"unknown parameter, {expected}{hint}", known)
        if times > 1:
            raise _refusal(name, f"given {times} times; give it once", known)


def _refusal(name: str, message: str, known: list[str]) -> Problem:
    shown = name[:64]
    errors = [{"in": "query", "field": shown, "message": message}]
    return InvalidRequest(f"query parameter {shown!r}: {message}", errors=errors, known=known)
