"""Features of images."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Response
from torch import Tensor

from fxcore.extractor import OutputInfo
from fxcore.graph.tokens.token_grid import TokenGrid
from fxcore.images.files import image_header
from service import problems
from service.codecs import heatmap, responses
from service.codecs.requests import bodies
from service.codecs.tensors import json, npy, safetensors
from service.engine import ExtractorRecord, FeatureOptions
from service.engine.description import Description
from service.engine.requests.plan.edits import check_editable
from service.http.routes.v1.extractors import BUILD_PROBLEMS, COMPUTE_PROBLEMS, MAKING_PROBLEMS, IdOrName
from service.http.routes.v1.models import Model
from service.http.routing.declared import declares
from service.http.routing.hot_requests import HotRequest
from service.http.routing.hot_routes import BINARY, HotRoute, Parameters, json_body
from service.http.scope import joined_header
from service.schemas.regions import KINDS
from service.schemas.specs import MAX_INPUTS, MAX_NAME_LENGTH, ExtractorSpec, node_pairs, return_nodes_of
from service.schemas.v1.features import FeatureDocument, FeatureQuery, OneStepQuery

_PROBLEMS = (
    problems.UnknownExtractor,
    problems.NotAcceptable,
    problems.BodyTooLarge,
    problems.BadBox,
    problems.BadPoint,
    problems.BadMask,
    problems.BadEdit,
    problems.DuplicateKey,
    problems.NoHeatMap,
    *COMPUTE_PROBLEMS,
)

IMAGES_EXAMPLE = {"value": {"images": ["/9j/4AAQSkZJRg…"]}}
BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "image/*": BINARY,
        "multipart/form-data": {
            "schema": {
                "type": "object",
                # Parts may have any name; Swagger UI has an input for files only where one is named.
                "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                "additionalProperties": {"type": "string", "format": "binary"},
                "minProperties": 1,
            }
        },
        "application/json": {
            "schema": {"$ref": "#/components/schemas/ImagesBody"},
            "examples": {
                "images": IMAGES_EXAMPLE,
                "regions": {
                    "summary": "With pool=roi",
                    "value": {"images": ["/9j/4AAQSkZJRg…"], "boxes": [[[48, 32, 310, 290]]]},
                },
                "points": {
                    "summary": "With pool=points",
                    "value": {"images": ["/9j/4AAQSkZJRg…"], "points": [[[120.5, 88], [300, 41.25]]]},
                },
                "masks": {
                    "summary": "With pool=mask",
                    "value": {
                        "images": ["/9j/4AAQSkZJRg…"],
                        "masks": [["iVBORw0KGgo…", {"size": [300, 451], "counts": [600, 90, 210, 134400]}]],
                    },
                },
                "edits": {
                    "summary": "With edits of inner values",
                    "value": {
                        "images": ["/9j/4AAQSkZJRg…"],
                        "edits": [
                            {"node": "layer2", "channels": [5, 17], "scale": 0},
                            {"node": "layer3", "box": [0, 0, 7, 14], "scale": 0, "shift": 0.5, "images": [0]},
                        ],
                    },
                },
            },
        },
        npy.MEDIA_TYPE: BINARY,
        safetensors.MEDIA_TYPE: BINARY,
    },
}
RESPONSE: dict[str, Any] = {
    "description": "The features, in the media type that Accept prefers.",
    "content": {json.MEDIA_TYPE: json_body(FeatureDocument), **{kind: BINARY for kind in responses.OFFERED[1:]}},
    "headers": {
        "Server-Timing": {
            "description": "Milliseconds of each stage.",
            "schema": {"type": "string"},
            "example": "decode;dur=6.1, queue;dur=0.2, compute;dur=48.0, encode;dur=1.9",
        },
        "X-Fxserve-Weights": {
            "description": "Name of the weights, percent-encoded.",
            "schema": {"type": "string"},
            "example": "IMAGENET1K_V2",
        },
        "X-Fxserve-Note": {
            "description": "Why the precision is slower than float32 on this machine; absent if it is not.",
            "schema": {"type": "string"},
        },
    },
}


@declares("read", *_PROBLEMS, *BUILD_PROBLEMS, problems.InvalidRequest, problems.BadTensor, body="images")
async def extract(request: HotRequest[FeatureQuery]) -> Response:
    """Compute features of one or more images with an extractor."""
    extractor = request.path_params["extractor"]
    return await _respond(request, lambda: request.engine.extractors.look_up(extractor))


@declares("read", *_PROBLEMS, *MAKING_PROBLEMS, body="images")
async def extract_in_one_step(request: HotRequest[OneStepQuery]) -> Response:
    """Compute features of one or more images at a model's nodes, creating the extractor if needed."""
    query, model = request.query, request.path_params["model"]
    await request.shared.model(request.caller, model)  # refuses unknown models before the spec is validated
    spec = ExtractorSpec(
        model=model,
        weights=query.weights,
        return_nodes=named_nodes(query.nodes),
        precision=query.precision,
        backend=query.backend,
        image_size=query.image_size,
        fit=query.fit,
        inputs=None if query.inputs is None else _input_names(query.inputs),
    )
    return await _respond(request, lambda: request.shared.extractor(request.caller, spec))


def _input_names(text: str) -> list[str]:
    """Parse ``"layer2,layer3"`` into the ``inputs`` of a spec.

    Raises:
        Problem: 422: a name is invalid, or there are too many.
    """
    names = [name.strip() for name in text.split(",")]
    fault = None
    if "" in names:
        fault = "has an empty name; give names of nodes, separated by single commas, as in layer2,layer3"
    elif max(map(len, names)) > MAX_NAME_LENGTH:
        fault = f"has a name of more than {MAX_NAME_LENGTH} characters"
    elif len(names) > MAX_INPUTS:
        fault = f"has {len(names)} names, and at most {MAX_INPUTS} are allowed"
    if fault is not None:
        raise problems.InvalidRequest(f"query parameter 'inputs' {fault}", field="inputs")
    return names


def named_nodes(text: str) -> list[str] | dict[str, str]:
    """Parse ``"layer3:C4,layer4"`` into the ``return_nodes`` of a spec.

    Raises:
        Problem: 422: a name or key is invalid, a node is named twice with different keys, or there are too many.
    """
    try:
        pairs = node_pairs(text)
    except ValueError as fault:
        raise problems.InvalidRequest(f"query parameter 'nodes': {fault}", field="nodes") from fault
    named = return_nodes_of(pairs)
    if isinstance(named, dict) and len(named) != len(pairs):
        twice = next(node for node, _ in pairs if sum(node == other for other, _ in pairs) > 1)
        raise problems.DuplicateKey(
            f"{twice!r} is named twice; name it once, since both tensors would be equal",
            key=named[twice],
        )
    return named


async def _respond(request: HotRequest[Any], find: Callable[[], Awaitable[ExtractorRecord]]) -> Response:
    """Serve a request of either route."""
    request.check_body()
    query, engine = request.query, request.engine
    # Only JSON has regions and edits, which are checked before a build.
    sent = await request.parse(bodies.parse, request.kind, "") if request.kind == json.MEDIA_TYPE else None
    # What has no effect keeps its default, because requests with equal options share a batch's pooling.
    options = FeatureOptions(
        pool=query.pool,
        dtype=query.dtype,
        normalize=query.normalize,
        preprocess=query.preprocess,
        roi_size=query.roi_size if query.pool == "roi" else FeatureOptions.roi_size,
        project=query.project,
        seed=query.seed if query.project is not None else 0,
        tokens=query.tokens,
    )
    options.check_regions(None if sent is None else sent.regions)
    record = await find()
    description = record.description
    if sent is not None and sent.edits:
        check_editable(description)
    if record.runtime is None:
        await request.read_body()  # before that, a disconnect is not noticed
        await engine.runtimes.load(record)
    added = KINDS[options.pool].output if options.pool in KINDS else None
    if added in description.return_nodes:
        detail = f"pool={options.pool} adds an output {added!r}: give the extractor's output of that name another key"
        raise problems.DuplicateKey(detail, key=added)
    dtypes = tuple(options.dtype if options.dtype and "float" in o.dtype else o.dtype for o in record.outputs)
    reduced = options.one_shape or options.tokens is not None
    negotiated = partial(negotiate, request, dtypes, reduced, record.outputs[0])
    accepted = negotiated()
    if sent is None:
        sent = await request.parse(bodies.parse, request.kind, description.inputs[0].name)
    if accepted == heatmap.MEDIA_TYPE:
        accepted = negotiated(sent)  # not every request can be drawn
    drawn = accepted == heatmap.MEDIA_TYPE
    if drawn:
        options = replace(options, sent=False)  # the picture is small, whatever the map is
    features = await engine.features(
        record, sent.inputs, options, sent.regions, request.reservation, sent.edits, request.deadline.at
    )
    started = time.perf_counter()
    if drawn:
        output = record.outputs[0]
        parts = await draw(request, description, sent, features.outputs[output.key], output.layout, output.tokens)
    else:
        if features.region_image is not None:  # not in npy responses, which hold only the first output
            features.outputs[KINDS[options.pool].output] = features.region_image
        origin = description.metadata, description.return_nodes
        parts = await write(request, accepted, *origin, features.outputs, {"images": features.images})
    return request.respond(description, features.timings, started, parts, accepted, {"Vary": "Accept"})


def negotiate(
    request: HotRequest[Any],
    dtypes: tuple[str | None, ...],
    reduced: bool,
    shown: OutputInfo | None,
    sent: bodies.Sent | None = None,
) -> str:
    """Return the media type of the response: that of a heat-map only if it can be drawn or nothing else is accepted.

    Args:
        request: the request, with its header Accept.
        dtypes, reduced: see :func:`service.codecs.responses.negotiate`.
        shown: the output that a heat-map shows; None if it is certainly a map.
        sent: the images; None if they are not known yet.

    Raises:
        NotAcceptable: no type is possible, or a heat-map of these images is not.
        NoHeatMap: only a heat-map is accepted, and ``shown`` is not a map.
    """
    accept = joined_header(request.scope, b"accept")
    accepted = responses.negotiate(accept, dtypes, reduced)
    if accepted != heatmap.MEDIA_TYPE:
        return accepted
    try:
        if shown is not None:
            heatmap.check(shown.shape, shown.layout if shown.rows_per_image == 1 else None, shown.tokens)
        if sent is not None and (isinstance(sent.inputs, Mapping) or len(sent.inputs) != 1):
            detail = "a heat-map is drawn over one encoded image; send exactly one"
            raise problems.NotAcceptable(detail, available=list(responses.OFFERED[:-1]))
    except problems.Invalid as undrawable:
        try:
            return responses.negotiate(accept, dtypes, reduced=True)
        except problems.NotAcceptable:
            raise undrawable from None
    return accepted


async def draw(
    request: HotRequest[Any],
    description: Description,
    sent: bodies.Sent,
    tensor: Tensor,
    layout: str | None,
    tokens: TokenGrid | None,
) -> responses.Parts:
    """Draw a map ``[1, …]``, or tokens with a grid, over its image; see :func:`service.codecs.heatmap.write`."""
    assert not isinstance(sent.inputs, Mapping)
    [image] = sent.inputs
    preprocessing = None if request.query.preprocess == "none" else description.preprocessing
    usual = description.preprocessing.nominal_size()
    header = await request.engine.run_in_encoder(image_header, image)
    size = header.height, header.width
    memory = header.held + (3 * math.prod(size) if preprocessing is None else preprocessing.held(*size))
    request.reservation.claim(memory)
    return await request.engine.run_in_encoder(heatmap.write, image, preprocessing, tensor, layout, tokens, usual)


async def write(
    request: HotRequest[Any],
    accepted: str,
    metadata: Mapping[str, str],
    nodes: Mapping[str, str],
    outputs: Mapping[str, Tensor],
    fields: Mapping[str, object],
) -> responses.Parts:
    """Write the outputs; see :func:`service.codecs.responses.write`."""
    encoding = request.query.encoding
    memory = responses.written_bytes(accepted, outputs, encoding)
    return await request.encode(memory, responses.write, accepted, metadata, nodes, outputs, encoding, fields)


_OF_EXTRACTOR = Parameters(FeatureQuery, extractor=IdOrName)
_OF_MODEL = Parameters(OneStepQuery, model=Model)

routes = [
    HotRoute("/v1/extractors/{extractor}/features", extract, _OF_EXTRACTOR, "features", BODY, RESPONSE),
    HotRoute("/v1/models/{model}/features", extract_in_one_step, _OF_MODEL, "features", BODY, RESPONSE),
]
