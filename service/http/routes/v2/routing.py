"""Helpers shared by all routes under ``/v2``: parameters, documentation and small JSON bodies."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Path, Request
from pydantic import BaseModel, ValidationError

from service import problems
from service.codecs.requests import bodies
from service.http.scope import joined_header
from service.http.state import State
from service.schemas.problems import invalid_body

TAG = "Open Inference Protocol"

Name = Annotated[
    str, Path(description="An extractor's id or name, or a model's.", examples=["resnet50"], max_length=256)
]

# In the protocol, each route of a model exists with and without a version.
Version = Annotated[str, Path(description="There is only version 1.", examples=["1"])]

Body = TypeVar("Body", bound=BaseModel)

_MAX_JSON_BYTES = 2 * 1024**2


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Inline the references of a JSON schema, for a body that is documented by hand."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items() if key != "$defs"}
    return [_inlined(value, definitions) for value in schema] if isinstance(schema, list) else schema


def body(model: type[BaseModel], example: Any, *binary: str, required: bool = True) -> dict[str, Any]:
    """Build the ``openapi_extra`` of a route that parses its body itself.

    Args:
        model: the JSON body.
        example: an example of it.
        binary: accepted media types in addition to JSON.
        required: whether the body is required.
    """
    schema = model.model_json_schema()
    content: dict[str, Any] = {
        "application/json": {"schema": _inlined(schema, schema.get("$defs", {})), "example": example}
    }
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in binary}
    return {"requestBody": {"required": required, "content": content}}


async def small_json(request: Request, state: State, model: type[Body]) -> Body:
    """Read and validate a small JSON body; an empty body is an empty object.

    Raises:
        Problem: 413 over 2 MiB, 415 if it is compressed, 422 if it is not valid.
    """
    bodies.check("application/json", joined_header(request.scope, b"content-encoding"), ("application/json",))
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_JSON_BYTES:
            raise problems.BodyTooLarge(
                f"the body is larger than the limit of {_MAX_JSON_BYTES:,} bytes",
                limit=_MAX_JSON_BYTES,
            )
    try:
        return model.model_validate(await state.engine.run_in_encoder(orjson.loads, bytes(data) or b"{}"))
    except orjson.JSONDecodeError as error:
        raise problems.InvalidRequest(f"the body is not JSON: {error.msg}") from error
    except ValidationError as error:
        raise invalid_body(error) from error
