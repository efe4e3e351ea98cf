"""Attributions of a model's result to the values of a node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Response

from fxcore.attribution import check_positions, check_result
from fxcore.graph.cut import UnneededInput
from fxcore.graph.model_part import closed
from fxcore.graph.naming import is_group
from service import problems
from service.codecs import heatmap
from service.codecs.requests import bodies
from service.codecs.tensors import json
from service.engine import ExtractorRecord, FeatureOptions
from service.engine.description import Description, nodes_text
from service.engine.memory.graphs import graph_for
from service.engine.options import VALID_BOX
from service.engine.requests.attributing import Question
from service.engine.requests.plan.plan import Inputs
from service.engine.rows.shapes import row_layout
from service.http.routes.v1.extractors import COMPUTE_PROBLEMS, MAKING_PROBLEMS, IdOrName
from service.http.routes.v1.features import BODY, IMAGES_EXAMPLE, RESPONSE, draw, negotiate, write
from service.http.routes.v1.models import Model
from service.http.routing.declared import declares
from service.http.routing.hot_requests import HotRequest
from service.http.routing.hot_routes import HotRoute, Parameters, json_body
from service.schemas.specs import MAX_INPUTS, ExtractorSpec
from service.schemas.v1.attributions import AttributionDocument, AttributionQuery, OneStepAttributionQuery

_WHOLE = "attributions need a whole, differentiable model with one input size"

_ATTRIBUTION, _TARGETS = "attribution", "targets"

_BODY = {
    **BODY,
    "content": {
        **BODY["content"],
        # Regions and edits are for features only.
        json.MEDIA_TYPE: {**BODY["content"][json.MEDIA_TYPE], "examples": {"images": IMAGES_EXAMPLE}},
    },
}
_BACKEND = {"description": "The backend that computed them.", "schema": {"type": "string"}, "example": "eager"}
_RESPONSE = {
    **RESPONSE,
    "content": {**RESPONSE["content"], json.MEDIA_TYPE: json_body(AttributionDocument)},
    "headers": {**RESPONSE["headers"], "X-Fxserve-Backend": _BACKEND},
}

_declares = declares(
    "read",
    *MAKING_PROBLEMS,
    *COMPUTE_PROBLEMS,
    problems.UnknownExtractor,
    problems.BadTarget,
    problems.NotAcceptable,
    problems.BodyTooLarge,
    problems.NoHeatMap,
    body="images",
)


@_declares
async def attribute(request: HotRequest[AttributionQuery]) -> Response:
    """Attribute a result of an extractor's model to the values of a node. Runs on eager in float32."""
    request.check_body()
    record = await request.engine.extractors.look_up(request.path_params["extractor"])
    spec = record.description.spec
    if spec.precision == "int8":
        raise problems.Unsupported.choice("precision", "int8", ["float32", "bfloat16", "float16"], _WHOLE)
    for field, other in (("inputs", spec.inputs), ("transforms", spec.transforms)):
        if other:
            raise problems.Unsupported(f"{field} of {record.id} cannot be kept: {_WHOLE}", field=field)
    return await _respond(request, spec, record.description)


@_declares
async def attribute_in_one_step(request: HotRequest[OneStepAttributionQuery]) -> Response:
    """Attribute a result of a model to the values of a node. Runs on eager in float32."""
    request.check_body()
    query, model = request.query, request.path_params["model"]
    await request.shared.model(request.caller, model)
    spec = ExtractorSpec(
        model=model, weights=query.weights, return_nodes=[query.of], image_size=query.image_size, fit=query.fit
    )
    return await _respond(request, spec)


async def _respond(request: HotRequest[Any], spec: ExtractorSpec, named: Description | None = None) -> Response:
    """Attribute a result of the model of ``spec``; ``named`` is the extractor of the response, if it has one."""
    query, engine = request.query, request.engine
    await request.read_body()
    front, back, begin = await _halves(request, spec)
    await engine.runtimes.load(front)
    part = (await engine.runtimes.load(back)).extractor.part
    assert part is not None, "it begins at inner nodes"
    at, target = front.outputs[0], None if query.target == "max" else query.target
    check_result(back.outputs[0].shape[1:], target)
    drawn_as_map = query.method == "gradcam"
    if drawn_as_map:
        check_positions(row_layout(at.layout, at.rows_per_image), at.tokens, at.shape)
    negotiated = partial(negotiate, request, ("float32",), False, None if drawn_as_map else at)
    negotiated()
    sent = await request.parse(bodies.parse, request.kind, front.description.inputs[0].name)
    accepted = negotiated(sent)
    options = FeatureOptions(preprocess=query.preprocess, sent=False)
    options.check_regions(sent.regions)
    if sent.edits:
        raise problems.InvalidRequest(
            "only POST …/features supports edits; attributions take images only", field="edits"
        )
    asked = Question(query.method, at, target, query.steps)
    shape = [_rows(sent.inputs), *(size or 1 for size in at.shape[1:])]  # tensors' full shape is known later
    asked.answered_bytes(shape, engine.max_response_bytes)
    values = await engine.features(
        front, sent.inputs, options, reservation=request.reservation, deadline=request.deadline.at
    )
    asked = asked.of_rows(front.description, values, part.fixed)
    given = {name: values.outputs[name] for name in begin}
    found = await engine.attribute(back, given, asked, request.reservation, request.deadline.at)
    started = time.perf_counter()
    if accepted == heatmap.MEDIA_TYPE:
        drawn = (found.values[:, None], "NCHW", None) if drawn_as_map else (found.values, at.layout, at.tokens)
        parts = await draw(request, front.description, sent, *drawn)
    else:
        nodes = {_ATTRIBUTION: at.node}
        metadata = {**(named or back.description).metadata, "nodes": nodes_text(nodes)}
        outputs = {_ATTRIBUTION: found.values}
        if accepted != json.MEDIA_TYPE:
            outputs[_TARGETS] = found.targets
        if VALID_BOX in values.outputs:
            outputs[VALID_BOX] = values.outputs[VALID_BOX]
        fields = {"images": values.images, "method": query.method, "backend": "eager", _TARGETS: found.targets.tolist()}
        parts = await write(request, accepted, metadata, nodes, outputs, fields)
    timings = {**values.timings, "compute": values.timings["compute"] + found.milliseconds}
    headers = {"Vary": "Accept", "X-Fxserve-Backend": "eager"}
    return request.respond(back.description, timings, started, parts, accepted, headers)


async def _halves(
    request: HotRequest[Any], spec: ExtractorSpec
) -> tuple[ExtractorRecord, ExtractorRecord, Sequence[str]]:
    """Return the two extractors of an attribution and the names of the nodes between them.

    The first computes the node's values and everything else that the result depends on; the second computes the result
    from these.
    """
    state, caller, query = request.shared, request.caller, request.query
    for field, name in (("of", query.of), ("at", query.at)):
        if is_group(name):
            detail = f"query parameter {field!r} must be one node, but {name!r} stands for several"
            raise problems.InvalidRequest(detail, field=field)
    if spec.fit == "native":
        raise problems.Unsupported.choice("fit", "native", ["crop", "stretch", "pad"], _WHOLE)
    if query.at is None and query.method == "gradcam":
        raise problems.InvalidRequest(
            "method=gradcam needs a feature map as query parameter 'at', such as at=C5", field="at"
        )
    entry = await state.model(caller, spec.model)
    weights = entry.canonical_weights(spec.weights)
    if entry.is_quantized(weights):
        floating = [name for name in (*entry.published, "random") if not entry.is_quantized(name)]
        raise problems.Unsupported.choice("weights", weights, floating, f"they are int8, and {_WHOLE}")

    def begin_at() -> list[str]:
        graph = graph_for(spec, entry, entry.structure(spec.weights))
        return closed(graph, query.at or graph.inputs[0].name, query.of)

    key = spec.model, spec.weights, str(spec.image_size), spec.fit, query.at, query.of
    begin = state.cuts.get(key)
    if begin is None:
        try:
            begin = await state.trace(caller, begin_at)
        except UnneededInput as error:
            detail = f"{query.of!r} does not depend on {error.extra['name']!r}; choose an earlier node for at"
            raise problems.BadTarget(detail) from error
        if len(begin) > MAX_INPUTS:
            detail = (
                f"{query.of!r} depends on {len(begin) - 1} other nodes besides {begin[0]!r}; choose a node for at with "
                "fewer parallel branches, such as a level"
            )
            raise problems.BadTarget(detail)
        state.cuts.put(key, begin)
    own: dict[str, Any] = {"model": spec.model, "weights": spec.weights, "image_size": spec.image_size}
    after = ExtractorSpec(**own, return_nodes=[query.of], inputs=begin, backend="eager")
    before = ExtractorSpec(**own, fit=spec.fit, return_nodes=begin, backend="eager")
    try:
        back = await state.extractor(caller, after)
        return await state.extractor(caller, before), back, begin
    except problems.Forbidden as error:
        raise problems.Forbidden(
            "an attribution needs two extractors, from the image to the node 'at' and from there to the node 'of', "
            "which do not exist yet for these nodes; sent once with a key with scope admin, this request creates them"
        ) from error


def _rows(inputs: Inputs) -> int:
    """Return the number of rows; 0 for a scalar, which is refused when its tensors are planned."""
    if not isinstance(inputs, Mapping):
        return len(inputs)
    tensor = next(iter(inputs.values()))
    return tensor.shape[0] if tensor.ndim else 0


_OF_EXTRACTOR = Parameters(AttributionQuery, extractor=IdOrName)
_OF_MODEL = Parameters(OneStepAttributionQuery, model=Model)

routes = [
    HotRoute("/v1/extractors/{extractor}/attributions", attribute, _OF_EXTRACTOR, "features", _BODY, _RESPONSE),
    HotRoute("/v1/models/{model}/attributions", attribute_in_one_step, _OF_MODEL, "features", _BODY, _RESPONSE),
]
