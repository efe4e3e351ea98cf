"""The protocol's model repository: list, load and unload extractors and models."""

from __future__ import annotations

import asyncio
import math
from itertools import chain
from typing import Annotated

import orjson
from fastapi import APIRouter, Header, Request, Response
from pydantic import ValidationError

from fxcore.models.entry import ModelEntry
from service import problems
from service.http.lookups import LOOKUP_PROBLEMS, json_array
from service.http.routes.v1.extractors import MAKING_PROBLEMS
from service.http.routes.v2 import metadata
from service.http.routes.v2.routing import TAG, Name, body, small_json
from service.http.routing.declared import declares
from service.http.scope import Caller, Calling
from service.http.state import Shared, State
from service.schemas.problems import invalid_body
from service.schemas.specs import ExtractorSpec
from service.schemas.v2 import IndexRequest, LoadRequest, ModelReady, RepositoryEntry

router = APIRouter(prefix="/v2/repository", tags=[TAG])


@router.post(
    "/index",
    response_model=list[RepositoryEntry],
    openapi_extra=body(IndexRequest, {"ready": True}, required=False),
)
@declares("read", problems.InvalidRequest, problems.BodyTooLarge, problems.UnsupportedMediaType, *LOOKUP_PROBLEMS)
async def repository_index(request: Request, state: Shared, caller: Calling) -> Response:
    """List every extractor and model. A model is ready if its default weights are loaded.

    States are those of the process that responds.
    """
    payload = await small_json(request, state, IndexRequest)
    async with state.listings.place(caller) as run:
        extractors = state.engine.extractors
        others = [] if payload.ready else await extractors.elsewhere()
        if payload.ready:
            for record in state.engine.records.list():
                if record.runtime is not None:
                    await extractors.known(record.id)  # another process may have deleted it
        targets: list[metadata.Target] = [*state.engine.records.list(), *state.models()]
        here = metadata.entries(state, targets)
        entries = chain(
            (entry for entry in here if entry.state == "READY" or not payload.ready),
            (metadata.unloaded(name or stored.id, "it is not loaded in this process") for stored, name in others),
        )
        content = await run(lambda: json_array(entry.model_dump() for entry in entries))
    return Response(content, media_type="application/json")


@router.post(
    "/models/{name}/load",
    response_model=ModelReady,
    openapi_extra=body(LoadRequest, {"parameters": {"config": '{"weights": "random"}'}}, required=False),
)
@declares("admin", *MAKING_PROBLEMS, problems.BodyTooLarge, problems.UnsupportedMediaType, problems.DeadlineExceeded)
async def load(
    request: Request,
    state: Shared,
    caller: Calling,
    name: Name,
    x_request_timeout: Annotated[
        float | None,
        Header(alias="X-Request-Timeout", gt=0, allow_inf_nan=False, description="Seconds to wait.", examples=[60]),
    ] = None,
) -> ModelReady:
    """Load an extractor or a model. With ``config``, create an extractor with this name."""
    payload = await small_json(request, state, LoadRequest)
    config = payload.parameters.config
    timeout = min(x_request_timeout or math.inf, state.engine.settings.request_timeout)
    try:
        async with asyncio.timeout(timeout):
            if config is not None:
                spec = await _configured(state, caller, name, config)
                record, _ = await state.engine.extractors.get(spec, keep=True)
            else:
                target = await metadata.find(state, caller, name)
                if isinstance(target, ModelEntry):
                    spec = await metadata.own_spec(state, caller, target)
                    target, _ = await state.engine.extractors.get(spec)
                record = target
            await state.engine.runtimes.load(record)
    except TimeoutError:
        raise problems.DeadlineExceeded(f"{name} is still loading after {timeout:.0f} s; loading continues") from None
    return ModelReady(name=name, ready=True)


@router.post("/models/{name}/unload", response_model=ModelReady)
@declares("admin", problems.UnknownModel, problems.NotTraceable, problems.NotReady, *LOOKUP_PROBLEMS)
async def unload(state: Shared, caller: Calling, name: Name) -> ModelReady:
    """Unload an extractor, or all unnamed extractors over a model's default weights, from memory.

    Applies only to the process that responds. They stay in the index and can be loaded again. In-flight requests are
    still answered.
    """
    target = await metadata.find(state, caller, name)
    if isinstance(target, ModelEntry):
        unnamed = [record for record in state.engine.records.list() if record.name is None]
        model = target.name, target.default_weights
        records = [one for one in unnamed if (one.description.spec.model, one.description.weights) == model]
    else:
        records = [target]
    for record in records:
        state.engine.runtimes.unload(record)
    return ModelReady(name=name, ready=False)


async def _configured(state: State, caller: Caller, name: str, config: str) -> ExtractorSpec:
    """Build the spec described by a load request."""
    try:
        fields = await state.engine.run_in_encoder(orjson.loads, config)
    except orjson.JSONDecodeError as error:
        raise problems.InvalidRequest(f"parameter 'config' is not JSON: {error.msg}") from error
    if not isinstance(fields, dict):
        raise problems.InvalidRequest("parameter 'config' must be a JSON object with the fields of an extractor")
    fields = {"model": name, **fields, "name": name}
    try:
        if "return_nodes" not in fields and isinstance(fields["model"], str):
            weights = fields.get("weights", "DEFAULT")
            entry = await state.model(caller, fields["model"])
            own = await metadata.own_spec(state, caller, entry, weights if isinstance(weights, str) else "DEFAULT")
            fields["return_nodes"] = own.return_nodes
        return ExtractorSpec.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error) from error
