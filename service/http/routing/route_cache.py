"""A cache of validated route parameters, and the middleware that calls endpoints from it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from fxcore.errors import FxError
from service.http.headers import header
from service.http.problem_responses import error_response
from service.http.routing.queries import Route
from service.problems import Problem

_MAX_ENTRIES = 1024
_MAX_LENGTH = 1024
"""Maximum characters of query and header together; the path is bounded by its parameters."""

_TIMEOUT_HEADER = b"x-request-timeout"
"""The only header that a cached route may take a parameter from."""

_CALLS = "fxserve.calls"

CacheKey = tuple[str, str, bytes, str | None]
Call = Callable[[Request], Coroutine[Any, Any, Response]]


class RouteCache:
    """Innermost middleware: calls endpoints of :class:`CachedRoute` directly if path, query and timeout are cached.

    Clients send the same parameters with image after image. For short requests, routing, validation and FastAPI's
    dependencies are a large part of the event loop's work.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._calls: dict[CacheKey, tuple[APIRoute, Call]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        cached = self._calls.get(_cache_key(scope))
        if cached is None:
            scope[_CALLS] = self._calls
            await self.app(scope, receive, send)
            return
        scope["route"], call = cached  # the route is for metrics and traces
        try:
            response = await call(Request(scope, receive, send))
        except (FxError, Problem) as error:
            response = error_response(scope["path"], error)
        await response(scope, receive, send)


class CachedRoute(APIRoute):
    """Validates the parameters of each distinct path, query and timeout once, for :class:`RouteCache`.

    Its endpoint returns a response. It takes ``request``, and parameters from the path, the query or
    ``X-Request-Timeout``, which it must not modify.
    """

    def __init__(self, path: str, endpoint: Callable[..., Coroutine[Any, Any, Response]], **options: Any) -> None:
        super().__init__(path, self._caching(endpoint), **options)

    def _caching(self, endpoint: Callable[..., Coroutine[Any, Any, Response]]) -> Callable[..., Any]:
        """Wrap an endpoint so that it also caches its arguments, keeping its signature."""

        @functools.wraps(endpoint)
        async def respond(request: Request, **parameters: Any) -> Response:
            key = _cache_key(request.scope)
            if len(key[2]) + len(key[3] or "") <= _MAX_LENGTH:
                calls = request.scope[_CALLS]
                if len(calls) >= _MAX_ENTRIES:
                    calls.clear()
                calls[key] = self, functools.partial(endpoint, **parameters)
            return await endpoint(request=request, **parameters)

        # FastAPI would resolve string annotations in this module, which lacks their names.
        signature, hints = inspect.signature(endpoint), get_type_hints(endpoint, include_extras=True)
        resolved = [one.replace(annotation=hints[name]) for name, one in signature.parameters.items()]
        respond.__signature__ = signature.replace(parameters=resolved, return_annotation=Response)  # type: ignore[attr-defined]
        return respond


class StrictCachedRoute(CachedRoute, Route):
    """A cached route that refuses unknown query parameters."""


def _cache_key(scope: Scope) -> CacheKey:
    return scope["method"], scope["path"], scope["query_string"], header(scope, _TIMEOUT_HEADER)
