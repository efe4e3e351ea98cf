"""Metadata and health of the server and its models, in the Open Inference Protocol (V2)."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Depends, Request, Response

from fxcore.models.entry import ModelEntry
from service import problems
from service.http.lookups import LOOKUP_PROBLEMS
from service.http.routes.v2 import metadata
from service.http.routes.v2.routing import TAG, Name, Version
from service.http.routing.declared import declares
from service.http.scope import Calling
from service.http.state import Shared
from service.schemas.v2 import Live, ModelMetadata, ModelReady, Ready, ServerMetadata

router = APIRouter(prefix="/v2", tags=[TAG])

_VERSION = version("fxserve")


async def _version(version: Version) -> None:
    """Document the version in the path, which handlers read from the request."""


_VERSIONED = [Depends(_version)]


@router.get("", response_model=ServerMetadata)
@declares("read")
async def server_metadata() -> ServerMetadata:
    """Return the name, version and protocol extensions of this server."""
    return ServerMetadata(name="fxserve", version=_VERSION, extensions=["binary_tensor_data", "model_repository"])


@router.get("/health/live", response_model=Live)
@declares("open", problems.NotReady)
async def live(state: Shared) -> Live:
    """Check that the process is up and can use its device."""
    lost = state.engine.device_lost()
    if lost is not None:
        raise problems.NotReady(lost)
    return Live(live=True)


@router.get("/health/ready", response_model=Ready)
@declares("open", problems.NotReady, problems.Draining)
async def server_ready(state: Shared) -> Ready:
    """Check that preloading is done and the device worker responds."""
    ready, reason = state.engine.readiness()
    if not ready:
        raise problems.NotReady(reason)
    return Ready(ready=True)


@router.get("/models/{name}/versions/{version}", response_model=ModelMetadata, dependencies=_VERSIONED)
@router.get("/models/{name}", response_model=ModelMetadata)
@declares("read", problems.UnknownModel, problems.NotTraceable, *LOOKUP_PROBLEMS)
async def model_metadata(request: Request, state: Shared, caller: Calling, name: Name) -> Response:
    """Return the names, datatypes and shapes of inputs and outputs. No weights are loaded."""
    target = await metadata.find(state, caller, name, request.path_params.get("version", metadata.VERSION))
    key = ("metadata", name, None if isinstance(target, ModelEntry) else target.id)
    content = await state.document(caller, key, lambda: metadata.describe(name, target).model_dump_json().encode())
    return Response(content, media_type="application/json")


@router.get("/models/{name}/versions/{version}/ready", response_model=ModelReady, dependencies=_VERSIONED)
@router.get("/models/{name}/ready", response_model=ModelReady)
@declares("read", problems.UnknownModel, problems.NotTraceable, problems.NotReady, problems.Draining, *LOOKUP_PROBLEMS)
async def model_ready(request: Request, state: Shared, caller: Calling, name: Name) -> ModelReady:
    """Check that the model is loaded. If it is not, its first request or ``/v2/repository`` loads it."""
    target = await metadata.find(state, caller, name, request.path_params.get("version", metadata.VERSION))
    [entry] = metadata.entries(state, [target])
    if entry.state != "READY":
        raise problems.NotReady(f"{name}: {entry.reason}")
    return ModelReady(name=name, ready=True)
