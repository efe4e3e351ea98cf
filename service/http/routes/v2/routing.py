"""What all routes under ``/v2`` have in common: their parameters, their documentation and small JSON bodies."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Path, Request
from pydantic import BaseModel, ValidationError

from service.http.state import State
from service.schemas.problem_kinds import KINDS
from service.schemas.problems import Refusal, invalid_body, status_without_422
from service.schemas.v2 import ErrorV2

TAG = "Open Inference Protocol"

Name = Annotated[
    str, Path(description="An extractor's id or name, or a model's.", examples=["resnet50"], max_length=256)
]

# The protocol has every route of a model twice, with a version and without.
Version = Annotated[str, Path(description="There is only version 1.", examples=["1"])]

Body = TypeVar("Body", bound=BaseModel)

_MOST_JSON = 2 * 1024**2


def documented(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that may answer these problems."""
    responses: dict[int | str, dict[str, Any]] = {}
    for slug in slugs:
        kind = KINDS[slug]
        response = responses.setdefault(
            status_without_422(kind.status),
            {"model": ErrorV2, "description": kind.title, "content": {"application/json": {"examples": {}}}},
        )
        example = {"summary": kind.title, "value": {"error": kind.example}}
        response["content"]["application/json"]["examples"][slug] = example
    return responses


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema without references, for a body that is documented by hand."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items() if key != "$defs"}
    return [_inlined(value, definitions) for value in schema] if isinstance(schema, list) else schema


def body(model: type[BaseModel], example: Any, *binary: str, required: bool = True) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that parses its body itself.

    Args:
        model: the JSON body.
        example: of that body.
        binary: media types that are taken beside JSON.
        required: whether there must be a body.
    """
    schema = model.model_json_schema()
    content: dict[str, Any] = {
        "application/json": {"schema": _inlined(schema, schema.get("$defs", {})), "example": example}
    }
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in binary}
    return {"requestBody": {"required": required, "content": content}}


async def small_json(request: Request, state: State, model: type[Body]) -> Body:
    """A small JSON body, read and checked; none is an empty object.

    Raises:
        Refusal: 413 over 2 MiB, 422 where it is no JSON or another object.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_JSON:
            raise Refusal("body-too-large", f"this body has more than {_MOST_JSON:,} bytes", limit=_MOST_JSON)
    try:
        return model.model_validate(await state.engine.run_in_encoder(orjson.loads, bytes(data) or b"{}"))
    except orjson.JSONDecodeError as error:
        raise Refusal("invalid-request", f"the body is not JSON: {error.msg}") from error
    except ValidationError as error:
        raise invalid_body(error) from error
