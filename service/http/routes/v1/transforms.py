"""The graph transforms that an extractor can use."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Response

from fxcore.passes.registry import described, list_transforms
from service import problems
from service.engine.memory.transforms import parameters
from service.http.routing.declared import declares
from service.http.routing.strict_routes import StrictRoute
from service.schemas.v1.transforms import TransformList

router = APIRouter(prefix="/v1/transforms", tags=["extractors"], route_class=StrictRoute)


@router.get("", response_model=TransformList)
@declares("read", problems.InvalidRequest)
async def show_transforms() -> Response:
    """List the graph transforms, with the JSON Schema of their parameters."""
    found = [{**described(transform), "parameters": parameters(transform)} for transform in list_transforms()]
    return Response(orjson.dumps({"transforms": found}), media_type="application/json")
