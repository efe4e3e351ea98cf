"""Errors as they go over the wire: RFC 9457 problems, and ``{"error": …}`` under ``/v2``.

Every kind of error has one entry in :data:`KINDS`: its slug (the end of ``type``), status and title. What fxcore and
the engine raise finds its kind by its class name: ``UnknownNode`` is ``/problems/unknown-node``.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import groupby
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from fxcore.errors import FxError, finite

MEDIA_TYPE = "application/problem+json"

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

log = logging.getLogger("fxserve")


@dataclass(frozen=True)
class Kind:
    """One kind of error, with an example for the OpenAPI document."""

    status: int
    title: str
    example: str
    extra: Mapping[str, Any] = field(default_factory=dict)


KINDS: dict[str, Kind] = {
    "invalid-request": Kind(
        422,
        "Invalid request",
        "query parameter 'pool': Input should be 'none', 'avg', 'max', 'gem' or 'cls'",
        {
            "errors": [
                {"in": "query", "field": "pool", "message": "Input should be 'none', 'avg', 'max', 'gem' or 'cls'"}
            ]
        },
    ),
    "unauthorized": Kind(401, "Unauthorized", "this needs an API key: send the header Authorization: Bearer KEY"),
    "forbidden": Kind(
        403, "Forbidden", "DELETE /v1/extractors/r50 needs a key of scope admin, and alice has the scope read"
    ),
    "misdirected": Kind(
        421,
        "Misdirected request",
        "this server does not know that it is called 'fx.example.org'; FXSERVE_HOSTS lists the names it answers to",
    ),
    "request-timeout": Kind(
        408,
        "Request timeout",
        "4,096 bytes of the body came, and then nothing more or too little; a body may keep the server waiting for "
        "20 s, and every 65,536 bytes make good for one",
    ),
    "not-http": Kind(400, "Not HTTP", "what came is not a request as HTTP/1.1 has it"),
    "http-version": Kind(505, "HTTP version not supported", "this server speaks HTTP/1.1 and 1.0, and not 2.0"),
    "head-too-large": Kind(431, "Head too large", "the request line and the headers have more than 65,536 bytes"),
    "not-found": Kind(404, "Not found", "there is nothing at /v1/model; the routes are listed at /docs"),
    "method-not-allowed": Kind(405, "Method not allowed", "DELETE is not allowed on /v1/models; allowed: GET, HEAD"),
    "unknown-model": Kind(
        404, "Unknown model", "there is no model 'resnet5'; did you mean resnet50?", {"suggestions": ["resnet50"]}
    ),
    "unknown-extractor": Kind(
        404, "Unknown extractor", "there is no extractor 'r50'; did you mean r50-c4c5?", {"suggestions": ["r50-c4c5"]}
    ),
    "unknown-weights": Kind(
        422,
        "Unknown weights",
        "resnet50 has no weights 'V3'; ask for one of DEFAULT, IMAGENET1K_V1, IMAGENET1K_V2, random, file:NAME",
        {"available": ["DEFAULT", "IMAGENET1K_V1", "IMAGENET1K_V2", "random"]},
    ),
    "unknown-node": Kind(
        422,
        "Unknown node",
        "'layer5' is no node, level or path of resnet50; did you mean layer4?",
        {"name": "layer5", "suggestions": ["layer4"]},
    ),
    "duplicate-key": Kind(422, "Duplicate key", "two outputs are asked for under the key 'C4'", {"key": "C4"}),
    "not-traceable": Kind(
        422,
        "Not traceable",
        "rpn cannot be traced; ask for a node of backbone instead",
        {"module": "rpn", "source": "for img in images:"},
    ),
    "bad-image": Kind(
        422,
        "Bad image",
        "image 1: these 12 bytes are not an image; send one of JPEG, PNG, WEBP, GIF, BMP, TIFF",
        {"index": 1},
    ),
    "bad-tensor": Kind(422, "Bad tensor", "input 'x' must be float32 [N, 3, H, W] or uint8 [N, H, W, 3]"),
    "unsupported": Kind(
        422,
        "Not available here",
        "backend 'openvino' is not available here; available: auto, eager",
        {"field": "backend", "value": "openvino", "available": ["auto", "eager"]},
    ),
    "backend-refused": Kind(
        422,
        "Backend refused",
        "openvino in int8 has a cosine similarity to float32 of 0.9412, under 0.98; most is lost in features.0.0 (12 "
        "dB); it passes with the transform keep_float of features.0, at 0.9871",
        {
            "backend": "openvino",
            "min_cosine": 0.9412,
            "layers": [{"name": "features.0.0", "sqnr": 12.0, "relative": 0.25}],
            "spec": {"precision": "int8", "transforms": [{"name": "keep_float", "params": {"nodes": ["features.0"]}}]},
        },
    ),
    "unknown-transform": Kind(
        422,
        "Unknown transform",
        "there is no transform 'fuse_conv'; did you mean fuse_conv_bn?",
        {"name": "fuse_conv", "suggestions": ["fuse_conv_bn"]},
    ),
    "bad-parameter": Kind(
        422,
        "Bad parameter",
        "remove has no parameter 'relu'; it has dropout, identity",
        {"transform": "remove", "parameter": "relu"},
    ),
    "cannot-transform": Kind(
        422,
        "Cannot transform",
        "insert_after: the graph has no node 'layer9'; see the list of nodes",
        {"transform": "insert_after", "node": "layer9"},
    ),
    "cannot-keep": Kind(
        422,
        "Cannot keep a node",
        "remove cannot keep the node 'layer4', which is asked for",
        {"transform": "remove", "node": "layer4"},
    ),
    "cannot-export": Kind(
        422,
        "Cannot export",
        "quantized_resnet18 holds torch's own int8 layers, which onnx cannot express",
        {"format": "onnx"},
    ),
    "export-unavailable": Kind(
        422,
        "Export not available here",
        "export to openvino needs openvino, not installed here; install it, or ask for another format: fx, onnx",
        {"format": "openvino", "missing": ["openvino"]},
    ),
    "no-heat-map": Kind(422, "No heat-map", "this node gives one vector an image, and a heat-map needs a feature map"),
    "name-taken": Kind(
        409,
        "Name taken",
        "the name 'r50-c4c5' is taken by extractor 3f9a1c5be07d; choose another or delete that one",
        {"extractor": "3f9a1c5be07d"},
    ),
    "not-acceptable": Kind(
        406,
        "Not acceptable",
        "none of 'text/csv' can be answered; Accept one of application/json, application/x-safetensors",
        {"available": ["application/json", "application/x-safetensors"]},
    ),
    "unsupported-media-type": Kind(
        415,
        "Unsupported media type",
        "a body of type 'text/csv' is not taken; send one of image/*, multipart/form-data",
        {"available": ["image/*", "multipart/form-data"]},
    ),
    "body-too-large": Kind(
        413, "Body too large", "the body is larger than 67,108,864 bytes, the most that is taken", {"limit": 67108864}
    ),
    "image-too-large": Kind(
        413,
        "Image too large",
        "the image has 65535 x 65535 = 4294836225 pixels; at most 50000000 are taken",
        {"pixels": 4294836225, "limit": 50000000, "index": 0},
    ),
    "request-too-large": Kind(
        413,
        "Request too large",
        "the request would need 4,294,967,296 bytes of memory and the server gives all requests together 2,147,483,648",
        {"bytes": 4294967296, "limit": 2147483648},
    ),
    "response-too-large": Kind(
        413,
        "Response too large",
        "the answer would have 411,041,792 bytes and the limit is 268,435,456; to shrink it: pool=avg, dtype=float16",
        {"bytes": 411041792, "limit": 268435456, "ways": ["pool=avg", "dtype=float16"]},
    ),
    "admission-full": Kind(
        429, "Too many requests", "256 requests are being served already; try again in 2 seconds", {"retry_after": 2.0}
    ),
    "deadline-exceeded": Kind(
        504, "Deadline exceeded", "the deadline passed before the answer was ready; its queued work was dropped"
    ),
    "draining": Kind(
        503, "Shutting down", "the service is not ready: it is shutting down and takes no new work", {"reason": "…"}
    ),
    "not-ready": Kind(503, "Not ready", "the service is not ready: preloads are being built", {"reason": "…"}),
    "out-of-memory": Kind(503, "Out of memory", "not even one image of this request fits in the device's memory"),
    "weights-unavailable": Kind(
        503,
        "Weights unavailable",
        "resnet50-11ad3fa6.pth is not in /weights/hub/checkpoints and could not be downloaded; put the file there, or "
        "ask for weights=random to try without",
        {"file": "resnet50-11ad3fa6.pth", "folder": "/weights/hub/checkpoints"},
    ),
    "compute-failed": Kind(500, "Compute failed", "the model raised while it computed this request"),
    "extractor-failed": Kind(500, "Extractor failed", "the extractor could not be built"),
    "internal": Kind(500, "Internal error", "something went wrong in the server; its log has the details"),
}


class Refusal(Exception):
    """A request that this layer refuses, by a slug of :data:`KINDS`; ``extra`` goes into the problem."""

    def __init__(self, slug: str, detail: str, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = extra


def slug_of(error: FxError) -> str:
    """The slug of an error's class: ``UnknownNode`` → ``unknown-node``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()


def problem(error: FxError | Refusal) -> dict[str, Any]:
    """The problem document of ``error``."""
    slug = error.slug if isinstance(error, Refusal) else slug_of(error)
    kind = KINDS.get(slug) or Kind(getattr(error, "status", 422), slug.replace("-", " ").capitalize(), "")
    return {
        "type": f"/problems/{slug}",
        "title": kind.title,
        "status": kind.status,
        "detail": error.detail,
        **{key: value for key, value in error.extra.items() if key not in ("type", "title", "status", "detail")},
    }


def problem_response(path: str, document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """``document`` as an answer, in the form that errors have under ``/v2`` or elsewhere."""
    v2 = path == "/v2" or path.startswith("/v2/")
    shown: Mapping[str, Any] = {"error": document["detail"]} if v2 else document
    return Response(
        json.dumps(finite(shown), default=str).encode(),
        int(document["status"]),
        dict(headers or {}),
        "application/json" if v2 else MEDIA_TYPE,
    )


def error_response(path: str, error: FxError | Refusal) -> Response:
    """The answer to a request that ended in ``error``."""
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    document = problem(error)
    if document["status"] >= 500 and document["status"] not in (503, 504):
        log.error("%s: %s", document["type"], error.detail, exc_info=error)
    return problem_response(path, document, headers)


def internal_response(path: str) -> Response:
    """The answer to a request that met a defect of ours; only the log says what it was."""
    return problem_response(path, problem(Refusal("internal", KINDS["internal"].example)))


def install(app: FastAPI) -> None:
    """Make ``app`` answer every error as a problem."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, FxError | Refusal)
        return error_response(request.url.path, error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(request.url.path, invalid_request(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(request.url.path, _from_http(request, error))

    app.add_exception_handler(FxError, known)
    app.add_exception_handler(Refusal, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def invalid_request(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """What pydantic found wrong, as one sentence and as a list for programs."""
    said: list[dict[str, str]] = []
    for error in _without_wrong_branches(errors):
        where, *path = (str(part) for part in error["loc"])
        message = error["msg"]
        if error["type"] == "json_invalid":
            path, message = [], f"it is not JSON: {error.get('ctx', {}).get('error', 'syntax error')}"
        said.append({"in": where, "field": _field(path), "message": message})
    first = said[0]
    noun = {"query": "query parameter", "path": "path parameter", "header": "header", "body": "field"}.get(
        first["in"], ""
    )
    subject = f"{noun} {first['field']!r}" if first["field"] else "the body"
    more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
    return Refusal("invalid-request", f"{subject}: {first['message']}{more}", errors=said)


def invalid_body(error: ValidationError) -> Refusal:
    """:func:`invalid_request` for a JSON body that a route validates itself."""
    return invalid_request([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])


def _without_wrong_branches(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For a field that may be a list or a map, pydantic reports errors of both kinds. Keep those of the kind that was
    sent; where it was neither, make one of them."""
    shown: list[Mapping[str, Any]] = []
    for _, group in groupby(errors, key=lambda error: [str(part) for part in error["loc"][:2]]):
        members = list(group)
        branches = [error for error in members if error["type"] in ("list_type", "dict_type")]
        others = [error for error in members if error not in branches]
        if len(branches) == 2:
            others = [{**branches[0], "msg": "Input should be a list of names or a map from name to key"}]
        shown += others or branches
    return shown


def _field(path: Sequence[Any]) -> str:
    """A field's path without pydantic's names for the members of a union, such as ``list[str]``."""
    return ".".join(str(part) for part in path if "[" not in str(part))


def _from_http(request: Request, error: HTTPException) -> Refusal:
    """Starlette's own errors: no such route, no such method, a body that cannot be parsed."""
    path = request.url.path
    if error.status_code == 404:
        hint = "no path here ends in /" if len(path) > 1 and path.endswith("/") else "the routes are listed at /docs"
        return Refusal("not-found", f"there is nothing at {path}; {hint}")
    if error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        detail = f"{request.method} is not allowed on {path}; allowed: {allowed}"
        return Refusal("method-not-allowed", detail, {"Allow": allowed})
    if error.status_code == 400:  # FastAPI's word for a body that it could not parse and does not say why
        return Refusal("invalid-request", "the body cannot be parsed: it is not UTF-8, or is nested too deeply")
    if error.status_code < 500:
        return Refusal("invalid-request", str(error.detail), error.headers)
    return Refusal("internal", KINDS["internal"].example, error.headers)


def _allowed(request: Request) -> list[str]:
    """The methods that a path takes. Starlette's error has those of the first route with this path only, and there may
    be a route for each method; nor does it have HEAD, which is answered as GET is."""
    scope = dict(request.scope)

    def routed(method: str) -> bool:
        scope["method"] = "GET" if method == "HEAD" else method
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in METHODS if routed(method)]


def documented(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that may answer these problems, with an example of each."""
    responses: dict[int | str, dict[str, Any]] = {}
    for slug in slugs:
        kind = KINDS[slug]
        example = {
            "type": f"/problems/{slug}",
            "title": kind.title,
            "status": kind.status,
            "detail": kind.example,
            **kind.extra,
        }
        response = responses.setdefault(
            kind.status,
            {
                "description": HTTPStatus(kind.status).phrase,
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}},
            },
        )
        response["content"][MEDIA_TYPE]["examples"][slug] = {"summary": kind.title, "value": example}
        if kind.status in (429, 503) and slug != "weights-unavailable":
            description = "Seconds to wait." if kind.status == 429 else "Seconds to wait; not with weights-unavailable."
            schema = {"type": "integer"}
            response["headers"] = {"Retry-After": {"description": description, "schema": schema, "example": 2}}
    return responses
