"""The OpenAPI document: FastAPI's, completed with the hot routes and the middleware's responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from pydantic.json_schema import models_json_schema

from service import problems
from service.http.middleware.request_context import REQUEST_ID_LENGTH
from service.http.problem_responses import shape_of
from service.http.routing.declared import Declared, DeclaredRoutes
from service.http.routing.hot_routes import HotRoute
from service.schemas import embeddings, v2
from service.schemas.examples import compose
from service.schemas.problems import PROBLEM, documented
from service.schemas.v1.attributions import AttributionDocument
from service.schemas.v1.features import FeatureDocument, ImagesBody
from service.schemas.v1.problems import Problem

_SECURITY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, if the server has keys. Scope `read` may query and compute; `admin` may also create, "
    "load and delete.",
}


_REQUEST_ID = {
    "description": f"The id that the request has sent, of at most {REQUEST_ID_LENGTH} printable ASCII characters; "
    "others are left out. A new one if it has sent none.",
    "schema": {"type": "string"},
    "example": "5f0c7a8e1b9d4e21",
}

_OF_NO_ROUTE = (
    problems.NotHTTP,
    problems.HTTPVersion,
    problems.HeadTooLarge,
    problems.NotFound,
    problems.MethodNotAllowed,
    problems.Internal,
)
"""Problems of any route, or of the middleware before it."""


def install(app: FastAPI, routes: DeclaredRoutes, hot_routes: Sequence[HotRoute]) -> None:
    """Make ``app`` complete its OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generate(), routes, hot_routes)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any], routes: DeclaredRoutes, hot_routes: Sequence[HotRoute]) -> dict[str, Any]:
    hot = {route.path: {"post": jsonable_encoder(route.operation, exclude_none=True)} for route in hot_routes}
    document["paths"] = {**hot, **document["paths"]}
    # The routes refer to these by name.
    _, shared = models_json_schema(
        [
            (Problem, "serialization"),
            (embeddings.OpenAIError, "serialization"),
            (v2.ErrorV2, "serialization"),
            (ImagesBody, "validation"),
            (FeatureDocument, "serialization"),
            (AttributionDocument, "serialization"),
            (embeddings.EmbeddingsDocument, "serialization"),
            (v2.InferResponse, "serialization"),
            (v2.InferRequest, "validation"),
            (v2.IndexRequest, "validation"),
            (v2.LoadRequest, "validation"),
            (embeddings.EmbeddingsRequest, "validation"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(shared["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own error schemas, which problems replace
        schemas.pop(name, None)
    components["headers"] = {"X-Request-ID": _REQUEST_ID}
    components["securitySchemes"] = {"key": _SECURITY_SCHEME}
    components["responses"] = {kind.slug: next(iter(documented(kind).values())) for kind in _OF_NO_ROUTE}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _add_problems(path, method, operation, routes.find({"method": method.upper(), "path": path}))
            for response in operation["responses"].values():
                response.setdefault("headers", {})["X-Request-ID"] = {"$ref": "#/components/headers/X-Request-ID"}
            for body in (operation.get("requestBody", {}), *operation["responses"].values()):
                content = body.get("content", {}).get("application/json")
                if content is not None and not content.keys() & {"example", "examples"}:
                    content["example"] = compose(content["schema"], schemas)
    return document


def _add_problems(path: str, method: str, operation: dict[str, Any], declared: Declared) -> None:
    """Add the problems that a route declares, and those that the middleware may return instead."""
    kinds = [*declared.errors, problems.Misdirected]
    if declared.access != "open":
        operation["security"] = [{"key": []}, {}]
        kinds += [problems.Unauthorized, problems.Forbidden, problems.Draining]
    if method == "post":  # of any, a body is read
        kinds += [problems.RequestTimeout, problems.BodyTooLarge, problems.AdmissionFull]
    shape = shape_of(path)
    # FastAPI adds 422 with its own schema; routes under /v1 that may answer it declare that.
    if operation["responses"].pop("422", None) is not None and shape is not PROBLEM:
        kinds.append(problems.InvalidRequest)
    for status, response in documented(*kinds, shape=shape).items():
        operation["responses"][str(status)] = response
