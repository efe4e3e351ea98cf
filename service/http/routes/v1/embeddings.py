"""Embeddings of images in OpenAI's shape."""

from __future__ import annotations

import functools
import math
import time

from fastapi import Response
from torch.nn import functional

from fxcore.extractor import OutputInfo
from fxcore.graph.head_pooling import DISTILLED
from fxcore.graph.naming import is_group
from fxcore.models.timm_models import PREFIX
from fxcore.pooling import pooled_shape
from service import problems
from service.codecs import embeddings
from service.codecs.tensors import json
from service.engine import ExtractorRecord, FeatureOptions
from service.http.routes.v1.extractors import COMPUTE_PROBLEMS, MAKING_PROBLEMS
from service.http.routing.declared import declares
from service.http.routing.hot_requests import HotRequest
from service.http.routing.hot_routes import HotRoute, NoQuery, Parameters, json_body
from service.schemas.embeddings import PATH, EmbeddingsDocument
from service.schemas.specs import ExtractorSpec, spec_of_text

_CACHED_SPECS = 1024

_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/EmbeddingsRequest"},
            "example": {
                "model": "resnet50:avgpool",
                "input": ["data:image/jpeg;base64,/9j/4AAQSkZJRg…"],
                "encoding_format": "float",
                "dimensions": 256,
            },
        }
    },
}
_RESPONSE = {"description": "One vector per image.", "content": {json.MEDIA_TYPE: json_body(EmbeddingsDocument)}}
_POOLED = {pool: FeatureOptions(pool, "float32") for pool in ("avg", "max", "cls", DISTILLED)}


@declares("read", *MAKING_PROBLEMS, *COMPUTE_PROBLEMS, problems.UnknownExtractor, body="images")
async def embed(request: HotRequest[NoQuery]) -> Response:
    """Embed images, one vector each, in OpenAI's shape: its clients work with this server as their `base_url`.

    Maps are averaged over their positions. Tokens are pooled as in the model's own head: by the class token; by the
    mean of the patch tokens if there is no class token or if the head averages, as in BEiT and DINOv3; by attention, as
    in SigLIP; or by the mean of both class tokens, as in distilled DeiTs. Values are not normalized unless `dimensions`
    is given, which scales vectors to unit length.
    """
    request.check_body(("application/json",))
    engine = request.engine
    body, images = await request.parse(embeddings.read)
    record = await _extractor(request, body.model)
    runtime = record.runtime or await engine.runtimes.load(record)
    pooled = runtime.extractor.graph.attention_pools.get(record.outputs[0].node)
    if pooled is not None:
        spec = record.description.spec.model_copy(update={"name": None, "return_nodes": {pooled: pooled}})
        # The client may already request this node, so no admin key is needed.
        record, _ = await engine.extractors.get(spec)
        runtime = record.runtime or await engine.runtimes.load(record)
    output = record.outputs[0]
    options = _POOLED[(runtime.extractor.graph.pooling or "cls") if output.prefix.class_token else "avg"]
    if body.dimensions is not None:
        _check_dimensions(body.dimensions, output, options.pool)
    result = await engine.features(
        record, images, options, reservation=request.reservation, deadline=request.deadline.at
    )
    started = time.perf_counter()
    vectors = result.outputs[output.key].reshape(result.images, -1)
    if body.dimensions is not None:
        vectors = functional.normalize(vectors[:, : body.dimensions], dim=1)
    memory = embeddings.max_bytes(vectors)
    parts = await request.encode(memory, embeddings.write, vectors, body.model, body.encoding_format)
    return request.respond(record.description, result.timings, started, parts, json.MEDIA_TYPE, {})


async def _extractor(request: HotRequest[NoQuery], model: str) -> ExtractorRecord:
    if ":" in model:
        spec = _spec(model)
        await request.shared.model(request.caller, spec.model)  # raises if it is not served
        return await request.shared.extractor(request.caller, spec)
    try:
        record = await request.engine.extractors.look_up(model)
    except problems.UnknownExtractor as error:
        name = model.partition("@")[0]
        if name.startswith(PREFIX) or name in {entry.name for entry in request.shared.models()}:
            raise problems.UnknownExtractor(
                f"{model!r} is a model: name one of its nodes, as in {model}:NODE; GET /v1/models/"
                f"{model.partition('@')[0]}/nodes lists them",
                suggestions=[],
            ) from None
        raise error
    keys = list(record.description.return_nodes)
    if len(keys) != 1:
        detail = f"the extractor {model!r} has {len(keys)} outputs ({', '.join(keys)}); an embedding needs exactly one"
        raise problems.InvalidRequest(detail, field="model")
    return record


@functools.lru_cache(_CACHED_SPECS)  # clients repeat the same text
def _spec(text: str) -> ExtractorSpec:
    """Parse an extractor with one node: ``resnet50:avgpool``, ``resnet50@random:C5``.

    Raises:
        Problem: the text has another form, or several nodes.
    """
    try:
        spec = spec_of_text(text)
    except ValueError:
        spec = None
    if spec is None or len(spec.return_nodes) != 1 or any(map(is_group, spec.return_nodes)):
        raise problems.InvalidRequest(
            f"{text[:200]!r} is not MODEL:NODE with one node, such as resnet50:avgpool or resnet50@random:C5",
            field="model",
        )
    return spec


def _check_dimensions(dimensions: int, output: OutputInfo, pool: str) -> None:
    """Check that the pooled vectors of ``output`` have at least ``dimensions`` values, before anything is computed.

    Raises:
        Problem: they have fewer.
    """
    shape = [1 if size is None else size for size in output.shape]  # pooling removes all sizes that depend on the image
    length = math.prod(pooled_shape(shape, output.layout, pool)) * output.rows_per_image
    if dimensions > length:
        detail = f"these embeddings have {length} dimensions, fewer than the {dimensions} requested"
        raise problems.InvalidRequest(detail, field="dimensions")


routes = [HotRoute(PATH, embed, Parameters(NoQuery), "features", _BODY, _RESPONSE)]
