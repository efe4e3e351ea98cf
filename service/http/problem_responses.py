"""Error responses: problem documents, ``{"error": …}`` under ``/v2``, and OpenAI's shape for embeddings."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from fxcore.errors import FxError, finite
from service.schemas import embeddings
from service.schemas.problem_kinds import KINDS
from service.schemas.problems import MEDIA_TYPE, Refusal, invalid_request, problem, status_without_422

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

log = logging.getLogger("fxserve")


def problem_response(path: str, document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Build the response for a problem document, in the shape of errors on ``path``."""
    shown, status, media_type = document, int(document["status"]), MEDIA_TYPE
    headers = dict(headers or {})
    if path == "/v2" or path.startswith("/v2/"):
        shown, media_type, status = {"error": document["detail"]}, "application/json", status_without_422(status)
    elif path == embeddings.PATH:
        shown, media_type = embeddings.openai_error(document), "application/json"
        if status >= 500 and "Retry-After" not in headers:  # OpenAI's clients retry 5xx unless told not to
            headers["X-Should-Retry"] = "false"
        status = status_without_422(status)
    return Response(json.dumps(finite(shown), default=str).encode(), status, headers, media_type)


def error_response(path: str, error: FxError | Refusal) -> Response:
    """Build the response to a request that failed with ``error``."""
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    document = problem(error)
    if document["status"] >= 500 and document["status"] not in (503, 504, 505):  # the others are bugs
        log.error("%s: %s", document["type"], error.detail, exc_info=error)
    return problem_response(path, document, headers)


def internal_response(path: str) -> Response:
    """Build the response to an unexpected exception; only the log has the details."""
    return problem_response(path, problem(Refusal("internal", KINDS["internal"].example)))


def install(app: FastAPI) -> None:
    """Register the handlers that turn exceptions into error responses."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, FxError | Refusal)
        return error_response(request.url.path, error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(request.url.path, invalid_request(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(request.url.path, _from_http(request, error))

    app.add_exception_handler(FxError, known)
    app.add_exception_handler(Refusal, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _from_http(request: Request, error: HTTPException) -> Refusal:
    """Convert Starlette's own errors: unknown route or method, a body that cannot be parsed."""
    path = request.url.path
    if error.status_code == 404:
        hint = "no path here ends in /" if len(path) > 1 and path.endswith("/") else "the routes are listed at /docs"
        return Refusal("not-found", f"there is nothing at {path}; {hint}")
    if error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        detail = f"{request.method} is not allowed on {path}; allowed: {allowed}"
        return Refusal("method-not-allowed", detail, {"Allow": allowed})
    if error.status_code == 400:  # FastAPI could not parse the body
        return Refusal("invalid-request", "the body cannot be parsed: it is not UTF-8, or is nested too deeply")
    if error.status_code < 500:
        return Refusal("invalid-request", str(error.detail), error.headers)
    return Refusal("internal", KINDS["internal"].example, error.headers)


def _allowed(request: Request) -> list[str]:
    """List the methods of a path.

    Starlette's error has only those of the first matching route, without HEAD.
    """
    scope = dict(request.scope)

    def routed(method: str) -> bool:
        scope["method"] = "GET" if method == "HEAD" else method
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in METHODS if routed(method)]
