"""Helpers shared by all routes under ``/v2``: parameters, documentation and small JSON bodies."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Path, Request
from pydantic import BaseModel, ValidationError

from service import problems
from service.codecs.requests import bodies
from service.http.routing.hot_routes import BINARY, json_body
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


def body(model: type[BaseModel], example: Any, *binary: str, required: bool = True) -> dict[str, Any]:
    """Build the ``openapi_extra`` of a route that parses its body itself.

    Args:
        model: the JSON body, whose schema is in the OpenAPI document.
        example: an example of it.
        binary: accepted media types in addition to JSON.
        required: whether the body is required.
    """
    content = {"application/json": {**json_body(model), "example": example}}
    content |= dict.fromkeys(binary, BINARY)
    return {"requestBody": {"required": required, "content": content}}


async def small_json(request: Request, state: State, model: type[Body]) -> Body:
    """Read and validate a small JSON body; an empty body is an empty object.

    Raises:
        Problem: 415 if it is compressed, 422 if it is not valid.
    """
    bodies.check("application/json", joined_header(request.scope, b"content-encoding"), ("application/json",))
    data = await request.body()  # the middleware limits it
    try:
        return model.model_validate(await state.engine.run_in_encoder(orjson.loads, data or b"{}"))
    except orjson.JSONDecodeError as error:
        raise problems.InvalidRequest(f"the body is not JSON: {error.msg}") from error
    except ValidationError as error:
        raise invalid_body(error) from error
