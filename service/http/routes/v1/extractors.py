"""Creating, listing, showing and deleting extractors."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Query, Request, Response

from fxcore.extractor import OutputInfo
from service import problems
from service.choices import GraphFormat
from service.engine import ExtractorRecord
from service.engine.extractors.store import Stored
from service.http import graph_formats
from service.http.lookups import LOOKUP_PROBLEMS, json_array
from service.http.routing.declared import declares
from service.http.routing.strict_routes import StrictRoute
from service.http.scope import Caller, Calling
from service.http.state import Shared, State
from service.schemas.problems import problem
from service.schemas.specs import ExtractorSpec
from service.schemas.v1.extractors import ExtractorDetail, ExtractorList

router = APIRouter(prefix="/v1/extractors", tags=["extractors"], route_class=StrictRoute)

DEFAULT_WAIT = 30.0
MAX_WAIT = 600.0
CHECK_SECONDS = 1.0
"""Seconds that the response for a new extractor waits for its checks, unless the client has asked for more."""

IdOrName = Annotated[str, Path(description="An extractor's id or name.", examples=["r50-c4c5"], max_length=256)]

# Problems of building an extractor. Every route that needs a built one may return them, because evicted ones are
# rebuilt.
BUILD_PROBLEMS = (
    problems.UnknownWeights,
    problems.BadParameter,
    problems.CannotTransform,
    problems.CannotKeep,
    problems.BackendRefused,
    problems.NotReady,
    problems.OutOfMemory,
    problems.WeightsUnavailable,
    problems.ExtractorFailed,
)

# Problems of looking into a built extractor.
BUILT_PROBLEMS = (problems.UnknownExtractor, problems.InvalidRequest, *LOOKUP_PROBLEMS, *BUILD_PROBLEMS)

# Problems of creating an extractor, explicitly or, like feature requests of a model, implicitly.
MAKING_PROBLEMS = (
    problems.UnknownModel,
    problems.UnknownNode,
    problems.OpenCut,
    problems.UnneededInput,
    problems.TooManyNodes,
    problems.DuplicateKey,
    problems.NotTraceable,
    problems.BadTensor,
    problems.Unsupported,
    problems.UnknownTransform,
    problems.InvalidRequest,
    problems.NameTaken,
    problems.StoreFull,
    *BUILD_PROBLEMS,
)

COMPUTE_PROBLEMS = (
    problems.ImageTooLarge,
    problems.RequestTooLarge,
    problems.ResponseTooLarge,
    problems.UnsupportedMediaType,
    problems.BadImage,
    problems.Overflow,
    problems.Ragged,
    problems.AdmissionFull,
    problems.ComputeFailed,
    problems.DeadlineExceeded,
)
"""Problems of sending images through an extractor, in any format."""


def describe(record: ExtractorRecord) -> dict[str, Any]:
    """Describe a record as :class:`service.schemas.v1.extractors.ExtractorDetail`."""
    description, failed, runtime = record.description, record.problem, record.runtime
    variants = runtime.variants.values() if runtime is not None else ()
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state,
        "model": description.spec.model,
        "weights": description.weights,
        "device": description.device,
        "backend": record.backend,
        "precision": description.spec.precision,
        "inputs": [
            {"name": spec.name, "node": spec.node, "layout": spec.layout or None, "shape": spec.shape}
            for spec in description.inputs
        ],
        "outputs": [_output(info) for info in record.outputs],
        "preprocessing": None if description.begins_at else description.preprocessing.describe(),
        "fingerprint": description.fingerprint,
        "sizes": [
            {"height": height, "width": width, "backend": one.backend, "images": one.images}
            for one in variants
            if not one.description.edits
            for height, width in [one.extractor.graph.input_size]
        ],
        "edits": [
            {"nodes": one.description.edits, "backend": one.backend, "images": one.images}
            for one in variants
            if one.description.edits
        ],
        "checks": record.checks,
        "note": description.note,
        "problem": problem(failed) if failed is not None else None,
    }


def _output(info: OutputInfo) -> dict[str, Any]:
    """Describe an output as :class:`service.schemas.v1.extractors.OutputDetail`, without validating it again: there may
    be a thousand."""
    described = {**vars(info), "prefix": {"count": info.prefix.count, "class_token": info.prefix.class_token}}
    del described["queries"]
    return described


def describe_stored(stored: Stored, name: str | None) -> dict[str, Any]:
    """Describe an extractor of the store that this process has not built, like :func:`describe`."""
    unknown = {"shape": None, "dtype": None, "layout": None, "stride": None, "bytes_per_image": None}
    return {
        "id": stored.id,
        "name": name,
        "state": "ready",
        "model": stored.spec.model,
        "weights": stored.spec.weights,
        "device": None,
        "backend": None,
        "precision": stored.spec.precision,
        "inputs": [{"name": name, "node": None, "layout": None, "shape": None} for name in stored.spec.inputs or ()],
        "outputs": [
            {"key": key, "node": node, **unknown, "rows_per_image": 1} for key, node in stored.return_nodes.items()
        ],
        "preprocessing": None,
        "fingerprint": stored.fingerprint,
        "checks": None,
        "problem": None,
    }


@router.post(
    "",
    response_model=ExtractorDetail,
    status_code=201,
    responses={
        200: {"model": ExtractorDetail, "description": "The extractor already existed."},
        201: {
            "description": "Created.",
            "headers": {"Location": {"description": "URL of the extractor.", "schema": {"type": "string"}}},
        },
        202: {"model": ExtractorDetail, "description": "Still being built after `wait` seconds."},
    },
)
@declares("admin", problems.BodyTooLarge, problems.UnsupportedMediaType, *MAKING_PROBLEMS)
async def create_extractor(
    state: Shared,
    spec: ExtractorSpec,
    wait: Annotated[
        float | None,
        Query(
            ge=0,
            le=MAX_WAIT,
            allow_inf_nan=False,
            description="Seconds to wait for the build, after the nodes have been resolved, and then for its checks; "
            "by default 30 s for the build and 1 s for the checks.",
            examples=[60],
        ),
    ] = None,
) -> Response:
    """Create an extractor: a model pruned to the parts that the chosen nodes need."""
    began = time.monotonic()
    record, created = await state.engine.extractors.get(spec, DEFAULT_WAIT if wait is None else wait, keep=True)
    if (failure := record.failure) is not None:
        raise failure
    runtime = record.runtime
    if runtime is not None and wait != 0:
        left = CHECK_SECONDS if wait is None else max(wait - (time.monotonic() - began), min(wait, CHECK_SECONDS))
        with suppress(TimeoutError):
            await asyncio.wait_for(runtime.checked.wait(), left)
    status = 202 if record.state == "building" else 201 if created else 200
    return Response(
        orjson.dumps(describe(record)), status, {"Location": f"/v1/extractors/{record.id}"}, "application/json"
    )


@router.get("", response_model=ExtractorList)
@declares("read", problems.InvalidRequest, *LOOKUP_PROBLEMS)
async def list_extractors(state: Shared, caller: Calling) -> Response:
    """List all extractors in any state. Those built only by other processes lack the shapes of their outputs."""
    async with state.listings.place(caller) as run:
        others = await state.engine.extractors.elsewhere()
        records = state.engine.records.list()
        content = await run(
            lambda: json_array(
                chain(map(describe, records), (describe_stored(stored, name) for stored, name in others))
            )
        )
    return Response(b'{"extractors":' + content + b"}", media_type="application/json")


@router.get("/{extractor}", response_model=ExtractorDetail)
@declares("read", problems.UnknownExtractor, problems.NotReady, problems.InvalidRequest)
async def show_extractor(state: Shared, extractor: IdOrName) -> Response:
    """Show an extractor. If another process created it, this one builds it before it responds."""
    record = await state.engine.extractors.look_up(extractor)
    if not record.outputs and record.adopted:  # just loaded from the store
        await state.engine.runtimes.wait(record, DEFAULT_WAIT)
    return Response(orjson.dumps(describe(record)), media_type="application/json")


@router.delete("/{extractor}", status_code=204, response_class=Response, responses={204: {"description": "Deleted."}})
@declares("admin", problems.UnknownExtractor, problems.NotReady, problems.InvalidRequest)
async def delete_extractor(state: Shared, extractor: IdOrName) -> Response:
    """Delete an extractor; requests in flight are still answered."""
    await state.engine.extractors.delete(extractor)
    return Response(status_code=204)


@router.get("/{extractor}/graph", responses={200: graph_formats.RESPONSE})
@declares("read", *BUILT_PROBLEMS, problems.NotAcceptable)
async def show_graph(
    request: Request,
    state: Shared,
    caller: Calling,
    extractor: IdOrName,
    format: Annotated[
        GraphFormat | None,
        Query(description="`table` and `code` are plain text. By default, `Accept` decides.", examples=["svg"]),
    ] = None,
    profile: Annotated[
        bool,
        Query(
            description="Measure each node's time and memory on a photograph, as medians over runs between requests. "
            "JSON only. Nodes are measured one by one in eager; the serving backend's time is reported too.",
            examples=[True],
        ),
    ] = False,
    depth: graph_formats.Depth = None,
) -> Response:
    """Show the graph that an extractor runs: the model's, pruned to its nodes."""
    chosen = graph_formats.chosen_format(format, request)
    if profile and chosen != "json":
        raise problems.InvalidRequest(f"profile=true needs JSON, not {chosen}; leave out one of the two")
    record = await state.engine.extractors.look_up(extractor)
    content = await (_profile(state, caller, record) if profile else _render(state, caller, record, chosen, depth))
    return graph_formats.response(content, chosen, format)


@router.get(
    "/{extractor}/code",
    response_class=Response,
    responses={
        200: {
            "description": "Python.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": "def forward(self, x):\n    …"}},
        },
    },
)
@declares("read", *BUILT_PROBLEMS)
async def show_code(state: Shared, caller: Calling, extractor: IdOrName) -> Response:
    """Show the Python code that torch.fx generated for an extractor's forward."""
    record = await state.engine.extractors.look_up(extractor)
    return Response(await _render(state, caller, record, "code"), media_type="text/plain")


async def _profile(state: State, caller: Caller, record: ExtractorRecord) -> bytes:
    key = ("profile", record.id, record.backend)
    async with state.lookups.place(caller) as run, state.profiling:
        content = state.documents.get(key)
        if content is None:
            runtime = await state.engine.runtimes.load(record, DEFAULT_WAIT)
            with runtime.in_use():
                found = await state.engine.profile(runtime)
                content = await run(lambda: graph_formats.write_part(runtime.extractor, "json", measured=found))
            state.documents.put(key, content)
    return content


async def _render(
    state: State, caller: Caller, record: ExtractorRecord, format: GraphFormat, depth: int | None = None
) -> bytes:
    key = ("extractor", record.id, format, depth)
    content = state.documents.get(key)
    if content is None:
        async with state.lookups.place(caller) as run:
            runtime = await state.engine.runtimes.load(record, DEFAULT_WAIT)
            with runtime.in_use():
                content = await run(lambda: graph_formats.write_part(runtime.extractor, format, depth))
        state.documents.put(key, content)
    return content
