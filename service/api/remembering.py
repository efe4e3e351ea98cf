"""Routes that remember what their parameters were found to be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from service.middleware import header

_REMEMBERED = 1024
_LONGEST = 1024
"""Of query and header together; the path is bounded by its parameters."""

_PARAMETERS = b"x-request-timeout"
"""The header that such a route may take a parameter from, beside its path and query."""


class RememberingRoute(APIRoute):
    """Validates the parameters of each distinct path, query and timeout once, and then calls the endpoint with them.

    Clients ask the same of image after image, and for a request of a few milliseconds validation, and what FastAPI
    keeps for dependencies, are a quarter of what the event loop has to do. An endpoint's parameters must be of the
    path, the query or ``X-Request-Timeout``, must not be changed by it, and beside them it takes only ``request``; it
    returns a response.
    """

    def __init__(self, path: str, endpoint: Callable[..., Coroutine[Any, Any, Response]], **options: Any) -> None:
        self._remembered: dict[tuple[str, bytes, str | None], dict[str, Any]] = {}
        self._answer = endpoint
        super().__init__(path, self._remembering(), **options)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        parameters = self._remembered.get(_asked(scope)) if scope["method"] in (self.methods or ()) else None
        if parameters is None:
            await super().handle(scope, receive, send)
            return
        response = await self._answer(request=Request(scope, receive, send), **parameters)
        await response(scope, receive, send)

    def _remembering(self) -> Callable[..., Coroutine[Any, Any, Response]]:
        """The endpoint, with the same signature; what it is called with is remembered."""

        @functools.wraps(self._answer)
        async def answer(request: Request, **parameters: Any) -> Response:
            asked = _asked(request.scope)
            if len(asked[1]) + len(asked[2] or "") <= _LONGEST:
                if len(self._remembered) >= _REMEMBERED:
                    self._remembered.clear()
                self._remembered[asked] = parameters
            return await self._answer(request=request, **parameters)

        # FastAPI would look up annotations that are text in this module, where they mean nothing.
        signature, hints = inspect.signature(self._answer), get_type_hints(self._answer, include_extras=True)
        known = [one.replace(annotation=hints[name]) for name, one in signature.parameters.items()]
        answer.__signature__ = signature.replace(parameters=known, return_annotation=Response)  # type: ignore[attr-defined]
        return answer


def _asked(scope: Scope) -> tuple[str, bytes, str | None]:
    return scope["path"], scope["query_string"], header(scope, _PARAMETERS)
