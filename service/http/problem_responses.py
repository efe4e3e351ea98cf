"""Error responses: problem documents, ``{"error": …}`` under ``/v2``, and OpenAI's shape for embeddings."""

from __future__ import annotations

import json
import logging
import math

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from fxcore.errors import FxError, finite
from service.http.routing.declared import route_path
from service.problems import Internal, InvalidRequest, MethodNotAllowed, NotFound, Problem
from service.schemas import embeddings, v2
from service.schemas.problems import PROBLEM, Shape, invalid_request, problem

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

log = logging.getLogger("fxserve")


def shape_of(path: str) -> Shape:
    """Return the shape of errors on ``path``."""
    if path == "/v2" or path.startswith("/v2/"):
        return v2.SHAPE
    return embeddings.SHAPE if path == embeddings.PATH else PROBLEM


def error_response(path: str, error: FxError | Problem) -> Response:
    """Build the response to a request for ``path`` that failed with ``error``."""
    document = problem(error)
    shape, status = shape_of(path), document["status"]
    headers = dict(error.headers) if isinstance(error, Problem) else {}
    if isinstance(error, Problem) and error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if status >= 500 and status not in (503, 504, 505) and not isinstance(error, Internal):  # all others are bugs
        log.error("%s: %s", document["type"], error.detail, exc_info=error)
    if shape is embeddings.SHAPE and status >= 500 and "Retry-After" not in headers:
        headers["X-Should-Retry"] = "false"  # OpenAI's clients retry 5xx by default
    content = json.dumps(finite(shape.body(document)), default=str).encode()
    return Response(content, shape.status(status), headers, shape.media_type)


def install(app: FastAPI) -> None:
    """Register the handler that turns exceptions into error responses."""

    async def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = invalid_request(error.errors())
        elif isinstance(error, HTTPException):
            error = _from_http(request, error)
        assert isinstance(error, FxError | Problem)
        return error_response(route_path(request.scope), error)

    for kind in (FxError, Problem, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, respond)


def _from_http(request: Request, error: HTTPException) -> Problem:
    """Convert Starlette's own errors: unknown route or method, a body that cannot be parsed."""
    path = request.url.path
    if error.status_code == 404:
        hint = "no path here ends in /" if len(path) > 1 and path.endswith("/") else "the routes are listed at /docs"
        return NotFound(f"there is nothing at {path}; {hint}")
    if error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        detail = f"{request.method} is not allowed on {path}; allowed: {allowed}"
        return MethodNotAllowed(detail, {"Allow": allowed})
    return InvalidRequest(  # 400: FastAPI could not parse the body
        "the body cannot be parsed: it is not UTF-8, is nested too deeply, or has a number of too many digits"
    )


def _allowed(request: Request) -> list[str]:
    """List the methods of a path.

    Starlette's error has only those of the first matching route, without HEAD.
    """
    scope = dict(request.scope)

    def routed(method: str) -> bool:
        scope["method"] = "GET" if method == "HEAD" else method
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in METHODS if routed(method)]
