"""Inference in the Open Inference Protocol (V2): JSON, optionally followed by raw tensors."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from fastapi import Request, Response
from pydantic_core import PydanticCustomError

from service import problems
from service.choices import pooling
from service.codecs import compression, v2
from service.codecs.negotiation import essence
from service.codecs.tensors import json
from service.engine import ExtractorRecord, FeatureOptions
from service.engine.options import NAMES, VALID_BOX
from service.http.routes.v1.extractors import COMPUTE_PROBLEMS, MAKING_PROBLEMS
from service.http.routes.v2 import metadata
from service.http.routes.v2.routing import TAG, Name, Version, body
from service.http.routing.declared import declares
from service.http.routing.hot_requests import HotRequest
from service.http.routing.hot_routes import BINARY, AnyQuery, HotRoute, Parameters, json_body
from service.http.scope import header, joined_header
from service.schemas.specs import MAX_NAME_LENGTH
from service.schemas.v1.features import listed_tokens
from service.schemas.v2 import InferRequest, InferResponse

_BODY = body(
    InferRequest,
    {
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["/9j/4AAQSkZJRg…"]}],
        "outputs": [{"name": "C5"}],
    },
    "application/octet-stream",
    "image/*",
)["requestBody"]
_RESPONSE = {
    "description": "The outputs, in JSON or as raw tensors after it.",
    "content": {
        json.MEDIA_TYPE: json_body(InferResponse),
        "application/octet-stream": BINARY,
    },
    "headers": {
        "Inference-Header-Content-Length": {
            "description": "Length of the JSON, after which raw tensors begin.",
            "schema": {"type": "integer"},
            "example": 172,
        }
    },
}


@declares("read", *MAKING_PROBLEMS, *COMPUTE_PROBLEMS, problems.BodyTooLarge, body="images")
async def infer(request: HotRequest[AnyQuery]) -> Response:
    """Compute outputs for encoded images, or for the model's own input."""
    name, version = request.path_params["name"], request.path_params.get("version", metadata.VERSION)
    state, engine, reservation = request.shared, request.engine, request.reservation
    target = await metadata.find(state, request.caller, name, version)
    _check_query(request)
    encoding = _encoding(request)
    engine.admission.check(reservation.client)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
    request.deadline.body_read()
    kind = essence(header(request.scope, b"content-type"))
    sent = v2.Body(data, header(request.scope, b"inference-header-content-length"), encoding, kind)
    tensors = await metadata.inputs_of(state, request.caller, target)
    arguments = sent, engine.settings.max_body_bytes, tensors
    payload = v2.read(*arguments) if sent.small else await engine.run_in_encoder(v2.read, *arguments)
    reservation.claim(max(0, payload.bytes - len(data)))
    del data, sent, arguments
    own_timeout = _own_timeout(payload)
    if own_timeout is not None:
        request.deadline.shorten(own_timeout)
    options = _options(payload)
    options.check_regions(None)  # the protocol does not support regions
    record = await _extractor(request, target, payload)
    await engine.runtimes.load(record)
    requested = _requested_outputs(record, name, payload, options)
    nodes = requested.keys() & record.description.return_nodes.keys()
    if 0 < len(nodes) < len(record.description.return_nodes):
        options = replace(options, keys=frozenset(nodes))
    inputs = payload.images if payload.images is not None else payload.tensors
    result = await engine.features(record, inputs, options, reservation=reservation, deadline=request.deadline.at)
    started = time.perf_counter()
    document = {"model_name": name, "model_version": metadata.VERSION}
    if payload.id is not None:
        document["id"] = payload.id
    outputs = {key: result.outputs[key] for key in requested}
    memory = sum(json.max_bytes(outputs[key]) for key, binary in requested.items() if not binary)
    parts, length = await request.encode(memory, v2.write, document, outputs, requested)
    headers = {"Vary": "Accept-Encoding"}
    if length is not None:
        headers["Inference-Header-Content-Length"] = str(length)
    packed = compression.asked_encoding(joined_header(request.scope, b"accept-encoding"))
    if packed is not None:  # features barely compress
        reservation.claim(sum(map(len, parts)))
        parts = await engine.run_in_encoder(compression.compress, parts, packed)
        headers["Content-Encoding"] = packed
    media_type = json.MEDIA_TYPE if length is None else "application/octet-stream"
    return request.respond(record.description, result.timings, started, parts, media_type, headers)


async def _extractor(request: HotRequest[AnyQuery], target: metadata.Target, payload: v2.Request) -> ExtractorRecord:
    weights = payload.parameters.get("weights", "DEFAULT")
    if isinstance(target, ExtractorRecord):
        if "weights" in payload.parameters:
            raise problems.InvalidRequest("parameter 'weights' is only for models; an extractor has its own weights")
        return target
    if not isinstance(weights, str) or not 0 < len(weights) <= MAX_NAME_LENGTH:
        raise problems.InvalidRequest("parameter 'weights' must be the name of weights, such as DEFAULT or random")
    nodes = [output.name for output in payload.outputs if output.name is not None]
    state, caller = request.shared, request.caller
    return await state.extractor(caller, await metadata.own_spec(state, caller, target, weights, nodes))


def _requested_outputs(
    record: ExtractorRecord, name: str, payload: v2.Request, options: FeatureOptions
) -> dict[str, bool]:
    """Map the keys of requested outputs, in order, to whether they are returned as raw bytes."""
    requested: dict[str, bool] = {}
    there = list(record.description.return_nodes)
    preprocessed = payload.images is not None or torch.uint8 in {tensor.dtype for tensor in payload.tensors.values()}
    if record.description.spec.fit == "pad" and preprocessed and options.preprocess != "none":
        there.append(VALID_BOX)
    for output in payload.outputs:
        for key in there if output.name is None else [output.name]:
            if key not in there:
                detail = f"{name} has no output {key!r}; it has {', '.join(there)}"
                raise problems.UnknownNode(detail, name=key, suggestions=there)
            if key in requested:
                raise problems.DuplicateKey(f"the output {key!r} is requested twice", key=key)
            requested[key] = output.binary
    for info in record.outputs:
        dtype = options.dtype if options.dtype is not None and "float" in info.dtype else info.dtype
        if dtype == "bfloat16" and not requested.get(info.key, True):
            raise problems.InvalidRequest(
                f"output {info.key!r} is BF16, which JSON cannot represent: use binary_data, or dtype=float32",
            )
    return requested


def _options(payload: v2.Request) -> FeatureOptions:
    given = {name: payload.parameters[name] for name in NAMES if name in payload.parameters}
    try:
        if "tokens" in payload.parameters:
            given["tokens"] = listed_tokens(payload.parameters["tokens"])
        if "pool" in given:
            pooling(given["pool"])  # FeatureOptions also accepts a pooling that only embeddings use
        return FeatureOptions(**given)
    except PydanticCustomError as error:
        raise problems.InvalidRequest(f"parameter 'tokens': {error.message()}") from error
    except ValueError as error:
        raise problems.InvalidRequest(f"parameter {error}") from error


def _own_timeout(payload: v2.Request) -> float | None:
    """Return the seconds of the protocol's own deadline, a parameter in microseconds; None if it is not given."""
    value = payload.parameters.get("timeout", 0)
    if type(value) is not int or value < 0:
        raise problems.InvalidRequest("parameter 'timeout' must be an integer number of microseconds")
    return value / 1e6 if value else None


def _check_query(request: Request) -> None:
    """Check that none of our parameters is in the query: the protocol has them in the body.

    Others, added by gateways, are ignored.

    Raises:
        Problem: 400: the query has a parameter that belongs in the body.
    """
    for name in request.query_params if request.scope["query_string"] else ():
        if name in _PARAMETERS:
            detail = f'query parameter {name!r} is not supported: send it in "parameters" of the JSON body'
            raise problems.InvalidRequest(detail)


_PARAMETERS = frozenset({*NAMES, "tokens", "weights", "timeout", "binary_data_output"})


def _encoding(request: Request) -> str:
    encoding = (joined_header(request.scope, b"content-encoding") or "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in compression.ENCODINGS:
        raise problems.UnsupportedMediaType(
            f"Content-Encoding {encoding[:40]!r} is not supported; use {', '.join(compression.ENCODINGS)} or none",
            available=list(compression.ENCODINGS),
        )
    return encoding


routes = [
    HotRoute("/v2/models/{name}/infer", infer, Parameters(AnyQuery, name=Name), TAG, _BODY, _RESPONSE),
    HotRoute(
        "/v2/models/{name}/versions/{version}/infer",
        infer,
        Parameters(AnyQuery, name=Name, version=Version),
        TAG,
        _BODY,
        _RESPONSE,
    ),
]
