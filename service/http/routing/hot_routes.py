"""Routes with images. They are plain Starlette routes, because FastAPI's overhead is large for short requests."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Generic

from fastapi import Header
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from service.http.routing.hot_requests import HotRequest, Query
from service.http.routing.strict_routes import check_query
from service.http.scope import header
from service.schemas.problems import invalid_request

_TIMEOUT = "X-Request-Timeout"
_SECONDS: TypeAdapter[float | None] = TypeAdapter(
    Annotated[
        float | None,
        Header(
            gt=0,
            allow_inf_nan=False,
            description="Deadline of the request, in seconds from its start.",
            examples=[10],
        ),
    ]
)

_MAX_CACHED = 1024
_MAX_CACHED_LENGTH = 1024
"""Maximum bytes of a cached query: clients send the same query with image after image."""


class AnyQuery(BaseModel):
    """The query of a route that has no parameters and ignores any, such as those that gateways add."""


class NoQuery(BaseModel):
    """The query of a route that accepts no parameters."""


class Parameters(Generic[Query]):
    """The path parameters, query parameters and timeout of a route with images.

    Args:
        query: model of the query parameters; others are refused, except with :class:`AnyQuery`.
        names: types of the path parameters, with their documentation.
    """

    def __init__(self, query: type[Query], **names: Any) -> None:
        self._query = query
        self._names = {name: TypeAdapter[str](kind) for name, kind in names.items()}
        self._known = sorted(query.model_fields)
        self._cached = functools.lru_cache(_MAX_CACHED)(self._parse_query)

    def parse(self, scope: Scope) -> tuple[Query, float | None]:
        """Return the query and the timeout in seconds of a request, and check its path parameters.

        Raises:
            InvalidRequest: a parameter is invalid, unknown or repeated.
        """
        text: bytes = scope["query_string"]
        errors: list[dict[str, Any]] = []
        query, timeout = None, None
        for name, kind in self._names.items():
            try:
                kind.validate_python(scope["path_params"][name])
            except ValidationError as error:
                errors += _at(error, "path", name)
        try:
            query = self._cached(text) if len(text) <= _MAX_CACHED_LENGTH else self._parse_query(text)
        except ValidationError as error:
            errors += _at(error, "query")
        if (sent := header(scope, b"x-request-timeout")) is not None:
            try:
                timeout = _SECONDS.validate_python(sent)
            except ValidationError as error:
                errors += _at(error, "header", _TIMEOUT)
        if query is None or errors:
            raise invalid_request(errors)
        return query, timeout

    def _parse_query(self, text: bytes) -> Query:
        given = QueryParams(text)
        if self._query is not AnyQuery:
            check_query(given.multi_items(), self._known)
        return self._query.model_validate(dict(given))

    def documentation(self) -> list[dict[str, Any]]:
        """Return the ``parameters`` of an operation of the OpenAPI document."""
        query = self._query.model_json_schema()
        required = query.get("required", ())
        return [
            *(_documented("path", name, kind.json_schema(), True) for name, kind in self._names.items()),
            *(_documented("query", name, one, name in required) for name, one in query.get("properties", {}).items()),
            _documented("header", _TIMEOUT, _SECONDS.json_schema(), False),
        ]


def _at(error: ValidationError, *place: str) -> list[dict[str, Any]]:
    return [{**one, "loc": (*place, *one["loc"])} for one in error.errors()]


def _documented(place: str, name: str, schema: dict[str, Any], required: bool) -> dict[str, Any]:
    schema = {"title": name.title(), **schema}
    if schema.get("default", ...) is None:
        del schema["default"]
    described = {"description": schema["description"]} if "description" in schema else {}
    return {"name": name, "in": place, "required": required, "schema": schema, **described}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the documentation of a JSON body whose schema is in the OpenAPI document."""
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


BINARY = {"schema": {"type": "string", "format": "binary"}}
"""The documentation of a body of bytes."""


class HotRoute(Route):
    """A POST route of Starlette with its OpenAPI documentation.

    Args:
        path: the path, with the names of its parameters.
        endpoint: responds to a request within its deadline; its name and docstring are documented.
        parameters: its parameters.
        tag: the section of the OpenAPI document.
        body: the documented ``requestBody``.
        response: the documented response 200.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[HotRequest[Any]], Awaitable[Response]],
        parameters: Parameters[Any],
        tag: str,
        body: Mapping[str, Any],
        response: Mapping[str, Any],
    ) -> None:
        super().__init__(path, endpoint, methods=["POST"])
        self._endpoint = endpoint
        self._parameters = parameters
        self.app = self._respond  # without Starlette's exception handlers, which the application already has
        name = endpoint.__name__
        self.operation = {
            "tags": [tag],
            "summary": name.replace("_", " ").title(),
            "description": inspect.getdoc(endpoint),
            "operationId": re.sub(r"\W", "_", f"{name}{self.path_format}") + "_post",
            "parameters": parameters.documentation(),
            "requestBody": body,
            "responses": {"200": response},
        }

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.NONE:
            child["route"] = self  # for metrics and traces
        return match, child

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HotRequest(scope, receive, send, *self._parameters.parse(scope))
        with request.deadline:
            response = await self._endpoint(request)
        await response(scope, receive, send)
