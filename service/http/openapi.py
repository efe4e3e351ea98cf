"""The OpenAPI document: that of the routes, completed by the middleware's responses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from service.http.access.scopes import OPEN
from service.http.routes.v2 import routing
from service.schemas import embeddings, problems
from service.schemas.features import ImagesBody
from service.schemas.v1 import Problem

_SECURITY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, if the server has keys. Scope `read` may query and compute; `admin` may also create, "
    "load and delete.",
}


_OF_NO_ROUTE = ("not-http", "http-version", "head-too-large", "not-found", "method-not-allowed", "internal")
"""Problems of any route, or of the middleware before it."""


def install(app: FastAPI) -> None:
    """Make ``app`` complete its OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generate())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    # Routes refer to these by name.
    _, shared = models_json_schema(
        [
            (Problem, "serialization"),
            (embeddings.OpenAIError, "serialization"),
            (ImagesBody, "validation"),
            (embeddings.EmbeddingsRequest, "validation"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(shared["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own error schemas, which problems replace
        schemas.pop(name, None)
    components["securitySchemes"] = {"key": _SECURITY_SCHEME}
    components["responses"] = {slug: next(iter(problems.documented(slug).values())) for slug in _OF_NO_ROUTE}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _add_refusals(path, operation)
    return document


def _add_refusals(path: str, operation: dict[str, Any]) -> None:
    """Add the problems that the middleware may answer instead of a route."""
    slugs = ["misdirected"]
    if path not in OPEN:
        operation["security"] = [{"key": []}, {}]
        slugs += ["unauthorized", "forbidden"]
    if "requestBody" in operation:
        slugs += ["request-timeout", "body-too-large", "admission-full"]
    documented, shape = problems.documented, "Problem"
    if path == "/v2" or path.startswith("/v2/"):
        documented, shape = routing.documented, "ErrorV2"
    elif path == embeddings.PATH:
        documented, shape = embeddings.documented, "OpenAIError"
    # FastAPI adds 422, which these routes never answer.
    if shape != "Problem" and operation["responses"].pop("422", None) is not None:
        slugs.append("invalid-request")
    # FastAPI has already resolved the models of responses, so the schema is added here.
    schema = {"$ref": f"#/components/schemas/{shape}"}
    for status, response in documented(*slugs).items():
        response.pop("model", None)
        there = operation["responses"].setdefault(str(status), response)
        for kind, content in response["content"].items():
            known = there["content"].setdefault(kind, {})
            known.setdefault("schema", schema)
            known["examples"] = {**known.get("examples", {}), **content["examples"]}
