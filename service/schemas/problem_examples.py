"""An example of every problem, for the OpenAPI document."""

from __future__ import annotations

from service import problems

_EXAMPLES = (
    problems.InvalidRequest(
        "query parameter 'dtype': Input should be 'float32', 'float16' or 'bfloat16'",
        errors=[
            {
                "in": "query",
                "field": "dtype",
                "message": "Input should be 'float32', 'float16' or 'bfloat16'",
            }
        ],
    ),
    problems.Unauthorized("this needs an API key: send the header Authorization: Bearer KEY"),
    problems.Forbidden("DELETE /v1/extractors/r50 needs a key with scope admin, and alice has scope read"),
    problems.Misdirected("'fx.example.org' is not a host name of this server; FXSERVE_HOSTS lists the allowed ones"),
    problems.RequestTimeout(
        "the body arrives too slowly: 4,096 bytes so far; the limit is 20 s, extended by 1 s for each 65,536 bytes "
        "received"
    ),
    problems.NotHTTP(),
    problems.HTTPVersion("this server speaks HTTP/1.1 and 1.0, not 2.0"),
    problems.HeadTooLarge("the request line and the headers have more than 65,536 bytes"),
    problems.NotFound("there is nothing at /v1/model; the routes are listed at /docs"),
    problems.MethodNotAllowed("DELETE is not allowed on /v1/models; allowed: GET, HEAD"),
    problems.UnknownModel("there is no model 'resnet5'; did you mean resnet50?", suggestions=["resnet50"]),
    problems.UnknownExtractor("there is no extractor 'r50'; did you mean r50-c4c5?", suggestions=["r50-c4c5"]),
    problems.UnknownWeights(
        "resnet50 has no weights 'IMAGENET_V2'; ask for one of DEFAULT, IMAGENET1K_V1, IMAGENET1K_V2, random, "
        "file:NAME",
        suggestions=["IMAGENET1K_V2", "IMAGENET1K_V1"],
        available=["DEFAULT", "IMAGENET1K_V1", "IMAGENET1K_V2", "random"],
    ),
    problems.Ragged(
        "output 'layer4' has different shapes for the images of this request (2048 x 7 x 10 and 2048 x 7 x 7)", "layer4"
    ),
    problems.UnknownNode("resnet50 has no node 'layer5'; did you mean layer4?", name="layer5", suggestions=["layer4"]),
    problems.OpenCut(
        "the requested nodes depend on the image not only through layer3.0.conv1; give layer3.0.downsample.1 too",
        missing=["layer3.0.downsample.1"],
    ),
    problems.UnneededInput(
        "no requested node depends on the input 'layer2' besides the other inputs; leave it out", name="layer2"
    ),
    problems.BadTarget("target must be from 0 to 999, or max for the largest, not 1000", target=1000),
    problems.TooManyNodes(
        "the names stand for 81 nodes, and groups may stand for at most 64 (FXSERVE_MAX_NODES); name fewer nodes",
        count=81,
        limit=64,
    ),
    problems.DuplicateKey("the key 'C4' is given twice; each name needs a key of its own", key="C4"),
    problems.NotTraceable(
        "rpn cannot be traced; ask for a node of backbone instead", module="rpn", source="for img in images:"
    ),
    problems.BadImage(
        "image 1: these 12 bytes are not an image; send one of JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF",
        index=1,
    ),
    problems.BadBox(
        "image 1: box 0, [300, 40, 120, 200], is empty or inverted: write [x1, y1, x2, y2] with x1 < x2 and y1 < y2",
        index=1,
        box=0,
    ),
    problems.BadPoint(
        "image 1: point 0, [700, 40], lies outside of its image, which is 640 x 427 pixels", index=1, point=0
    ),
    problems.BadMask(
        "image 1: mask 0 has 640 x 480 pixels and its image, after its EXIF orientation, 640 x 427", index=1, mask=0
    ),
    problems.BadEdit("edit 0: there is no channel 64 in layer1: it has 64, the first is 0", edit=0),
    problems.Overflow(
        "image 3: output 'layer1' has values beyond 65,504, the largest of float16: ask for dtype=bfloat16 or "
        "dtype=float32, or for normalize=l2",
        index=3,
        key="layer1",
    ),
    problems.BadTensor("input 'x' must be float32 [N, 3, H, W] or uint8 [N, H, W, 3]"),
    problems.Unsupported(
        "backend 'openvino' is not available here; available: auto, eager",
        field="backend",
        value="openvino",
        available=["auto", "eager"],
    ),
    problems.BackendRefused(
        "openvino in int8 has a cosine similarity to float32 of 0.9412, below 0.98; most is lost in features.0.0 (12 "
        "dB)",
        "openvino",
        "ask for precision=float32, or keep such layers in float with the transform keep_float",
        min_cosine=0.9412,
        layers=[{"name": "features.0.0", "sqnr": 12.0, "relative": 0.25}],
    ),
    problems.UnknownTransform(
        "there is no transform 'fuse_conv'; did you mean fuse_conv_bn?", name="fuse_conv", suggestions=["fuse_conv_bn"]
    ),
    problems.BadParameter(
        "remove has no parameter 'relu'; it has dropout, identity", transform="remove", parameter="relu"
    ),
    problems.CannotTransform(
        "insert_after: the graph has no node 'layer9'; name one of its nodes", transform="insert_after", node="layer9"
    ),
    problems.CannotKeep("remove cannot keep the node 'layer4', which is requested", transform="remove", node="layer4"),
    problems.CannotExport("quantized_resnet18 holds torch's own int8 layers, which onnx cannot express", format="onnx"),
    problems.ExportUnavailable(
        "export to openvino needs openvino, not installed here; install it, or use another format: fx, onnx",
        format="openvino",
        missing=["openvino"],
    ),
    problems.NoHeatMap(
        "a heat-map needs a feature map, but this node gives one vector per image; request a node before the "
        "pooling, such as a level"
    ),
    problems.StoreFull("extractors", 10_000, 10_000),
    problems.NameTaken("r50-c4c5", "3f9a1c5be07d"),
    problems.NotAcceptable(
        "cannot respond with 'text/csv'; Accept one of application/json, application/x-safetensors",
        available=["application/json", "application/x-safetensors"],
    ),
    problems.UnsupportedMediaType(
        "a body of type 'text/csv' is not supported; send one of image/*, multipart/form-data",
        available=["image/*", "multipart/form-data"],
    ),
    problems.BodyTooLarge("the body is larger than the limit of 67,108,864 bytes", limit=67108864),
    problems.ImageTooLarge(
        "the image has 65535 x 65535 = 4294836225 pixels; at most 50000000 are allowed",
        pixels=4294836225,
        limit=50000000,
        index=0,
    ),
    problems.RequestTooLarge(4_294_967_296, 2_147_483_648),
    problems.ResponseTooLarge(411_041_792, 268_435_456, ["pool=avg", "dtype=float16"]),
    problems.AdmissionFull("256 requests are in flight, which is the limit; try again in 2 s", 2.0),
    problems.DeadlineExceeded(),
    problems.Draining(),
    problems.NotReady("preloads are being built"),
    problems.OutOfMemory("not even one image of this request fits in the device's memory"),
    problems.WeightsUnavailable(
        "resnet50-11ad3fa6.pth is not in /weights/hub/checkpoints and could not be downloaded; put the file there, or "
        "use weights=random to try without",
        file="resnet50-11ad3fa6.pth",
        folder="/weights/hub/checkpoints",
    ),
    problems.ComputeFailed("the model failed on this request: RuntimeError: shape mismatch"),
    problems.ExtractorFailed("the extractor could not be built"),
    problems.Internal(),
)

EXAMPLES: dict[type[problems.Problem], problems.Problem] = {type(example): example for example in _EXAMPLES}
