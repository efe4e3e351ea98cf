"""Problem types: the slug that ends ``type``, with status, title and an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A problem type, with an example for the OpenAPI document."""

    status: int
    title: str
    example: str
    extra: Mapping[str, Any] = field(default_factory=dict)


KINDS: dict[str, Kind] = {
    "invalid-request": Kind(
        422,
        "Invalid request",
        "query parameter 'pool': Input should be 'none', 'avg', 'max', 'gem', 'cls' or 'roi'",
        {
            "errors": [
                {
                    "in": "query",
                    "field": "pool",
                    "message": "Input should be 'none', 'avg', 'max', 'gem', 'cls' or 'roi'",
                }
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
        "'fx.example.org' is not a host name of this server; FXSERVE_HOSTS lists them",
    ),
    "request-timeout": Kind(
        408,
        "Request timeout",
        "the body arrives too slowly: 4,096 bytes so far; the limit is 20 s, extended by 1 s for each 65,536 bytes "
        "received",
    ),
    "not-http": Kind(400, "Not HTTP", "this is not a valid HTTP/1.1 request"),
    "http-version": Kind(505, "HTTP version not supported", "this server speaks HTTP/1.1 and 1.0, not 2.0"),
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
        "resnet50 has no weights 'IMAGENET_V2'; ask for one of DEFAULT, IMAGENET1K_V1, IMAGENET1K_V2, random, "
        "file:NAME",
        {
            "suggestions": ["IMAGENET1K_V2", "IMAGENET1K_V1"],
            "available": ["DEFAULT", "IMAGENET1K_V1", "IMAGENET1K_V2", "random"],
        },
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
        "image 1: these 12 bytes are not an image; send one of JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF",
        {"index": 1},
    ),
    "bad-box": Kind(
        422,
        "Bad box",
        "image 1: box 0, [300, 40, 120, 200], is empty or inverted: write [x1, y1, x2, y2] with x1 < x2 and y1 < y2",
        {"index": 1, "box": 0},
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
        "export to openvino needs openvino, not installed here; install it, or use another format: fx, onnx",
        {"format": "openvino", "missing": ["openvino"]},
    ),
    "no-heat-map": Kind(422, "No heat-map", "this node gives one vector an image, and a heat-map needs a feature map"),
    "store-full": Kind(
        409,
        "Store full",
        "the store has 10,000 extractors and may have 10,000; delete extractors that nobody uses, which GET "
        "/v1/extractors lists, or raise FXSERVE_MAX_STORED_EXTRACTORS",
        {"stored": 10_000, "limit": 10_000},
    ),
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
        413, "Body too large", "the body is larger than the limit of 67,108,864 bytes", {"limit": 67108864}
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
        "the response would have 411,041,792 bytes and the limit is 268,435,456; to shrink it: pool=avg, dtype=float16",
        {"bytes": 411041792, "limit": 268435456, "ways": ["pool=avg", "dtype=float16"]},
    ),
    "admission-full": Kind(
        429, "Too many requests", "256 requests are being served already; try again in 2 seconds", {"retry_after": 2.0}
    ),
    "deadline-exceeded": Kind(
        504, "Deadline exceeded", "the deadline passed before the response was ready; its queued work was dropped"
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
        "use weights=random to try without",
        {"file": "resnet50-11ad3fa6.pth", "folder": "/weights/hub/checkpoints"},
    ),
    "compute-failed": Kind(500, "Compute failed", "the model raised while it computed this request"),
    "extractor-failed": Kind(500, "Extractor failed", "the extractor could not be built"),
    "internal": Kind(500, "Internal error", "something went wrong in the server; its log has the details"),
}
