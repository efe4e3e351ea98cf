"""Routes that cache their validated parameters, and the middleware that calls them from the cache."""

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
from service.http.queries import Route
from service.schemas.problems import Refusal

_REMEMBERED = 1024
_LONGEST = 1024
"""Most characters of query and header together that are cached; the path is bounded by its parameters."""

_PARAMETERS = b"x-request-timeout"
"""The only header that such a route may take a parameter from."""

_CALLS = "fxserve.calls"

Asked = tuple[str, str, bytes, str | None]
Call = Callable[[Request], Coroutine[Any, Any, Response]]


class RouteCache:
    """Innermost middleware, for :class:`CachedRoute`: a request whose path, query and timeout are known goes
    straight to the endpoint.

    Clients send the same parameters with image after image. In a request of a few milliseconds, routing, validation and
    FastAPI's dependencies are a good part of the event loop's work.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._calls: dict[Asked, tuple[APIRoute, Call]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        known = self._calls.get(_asked(scope))
        if known is None:
            scope[_CALLS] = self._calls
            await self.app(scope, receive, send)
            return
        scope["route"], call = known  # by which metrics and traces name it
        try:
            response = await call(Request(scope, receive, send))
        except (FxError, Refusal) as error:
            response = error_response(scope["path"], error)
        await response(scope, receive, send)


class CachedRoute(APIRoute):
    """Validates the parameters of each distinct path, query and timeout once; after that :class:`RouteCache` calls the
    endpoint with them.

    An endpoint takes ``request``, and parameters of the path, the query or ``X-Request-Timeout``, which it must not
    change; it returns a response.
    """

    def __init__(self, path: str, endpoint: Callable[..., Coroutine[Any, Any, Response]], **options: Any) -> None:
        super().__init__(path, self._caching(endpoint), **options)

    def _caching(self, endpoint: Callable[..., Coroutine[Any, Any, Response]]) -> Callable[..., Any]:
        """The endpoint with the same signature, which also caches its arguments."""

        @functools.wraps(endpoint)
        async def answer(request: Request, **parameters: Any) -> Response:
            asked = _asked(request.scope)
            if len(asked[2]) + len(asked[3] or "") <= _LONGEST:
                calls = request.scope[_CALLS]
                if len(calls) >= _REMEMBERED:
                    calls.clear()
                calls[asked] = self, functools.partial(endpoint, **parameters)
            return await endpoint(request=request, **parameters)

        # FastAPI would resolve annotations that are strings in this module, which does not have their names.
        signature, hints = inspect.signature(endpoint), get_type_hints(endpoint, include_extras=True)
        known = [one.replace(annotation=hints[name]) for name, one in signature.parameters.items()]
        answer.__signature__ = signature.replace(parameters=known, return_annotation=Response)  # type: ignore[attr-defined]
        return answer


class StrictCachedRoute(CachedRoute, Route):
    """A cached route that refuses query parameters it does not have."""


def _asked(scope: Scope) -> Asked:
    return scope["method"], scope["path"], scope["query_string"], header(scope, _PARAMETERS)
