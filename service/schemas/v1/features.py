"""Queries and JSON bodies of feature requests and responses under ``/v1``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StrictFloat,
    StrictInt,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from service.choices import POOL_PATTERN, Backend, Dtype, Fit, Normalize, Precision, Preprocess, pooling
from service.schemas.image_size import ImageSizeText
from service.schemas.specs import MAX_NAME_LENGTH, WeightsName
from service.schemas.strict import Strict
from service.schemas.unions import either

MAX_IMAGES = 1024
"""Maximum images of a request, in any form."""

MAX_DIMENSIONS = 8
"""Maximum dimensions of a tensor in a request."""

MAX_REGIONS = 16384
"""Maximum boxes, points or masks of a request."""

MAX_EDITS = 16
"""Maximum edits of a request."""

MAX_RUNS = 2**20
"""Maximum run lengths in a request, of all masks written as numbers."""

MAX_PROJECT = 65_536
"""Maximum values of a projected row."""

MAX_SEED = 2**32 - 1
"""Maximum seed of NumPy's generator."""

MAX_TOKENS = 1024
"""Maximum tokens that a request can select."""

ROI_SIZE = 7
"""Default side of the pooled boxes of `pool=roi`."""

Encoding = Literal["json", "base64"]


def _pooling(text: object) -> str:
    return pooling(text.replace(" ", "+") if isinstance(text, str) else text)  # a plus sign in a query is a space


_Pooling = Annotated[str, BeforeValidator(_pooling), WithJsonSchema({"type": "string", "pattern": POOL_PATTERN})]


def listed_tokens(text: object) -> tuple[int, ...]:
    """Parse token indices such as ``0,57``.

    Raises:
        PydanticCustomError: the text is invalid.
    """
    found = text.split(",") if isinstance(text, str) else []
    if not all(one.isascii() and one.isdigit() and len(one) < 8 for one in found) or not 0 < len(found) <= MAX_TOKENS:
        raise PydanticCustomError(
            "tokens",
            "Input should be up to {most} token indices from 0, separated by commas, such as 0,57",
            {"most": MAX_TOKENS},
        )
    return tuple(map(int, found))


_Tokens = Annotated[
    tuple[int, ...],
    BeforeValidator(listed_tokens),
    WithJsonSchema({"type": "string", "pattern": f"^[0-9]{{1,7}}(,[0-9]{{1,7}}){{0,{MAX_TOKENS - 1}}}$"}),
]


def _used_fit(fit: str, info: ValidationInfo) -> str:
    if fit in ("stretch", "pad") and info.data.get("preprocess") == "none":
        message = "preprocess=none does not resize images; leave out fit={fit}, or preprocess=none"
        raise PydanticCustomError("fit", message, {"fit": fit})
    return fit


UsedFit = Annotated[Fit, AfterValidator(_used_fit)]
"""The ``fit`` of a query with ``preprocess``."""


class FeatureQuery(BaseModel):
    """Query of a feature request."""

    pool: _Pooling = Field(
        default="none",
        description="Pool each map to one vector per image; the vectors of several poolings joined by `+` are "
        "concatenated. For tokens, `cls` returns the class token; the others exclude it and registers. With a JSON "
        "body, `roi` pools each box to a small map with `torchvision.ops.roi_align`; `points` samples the map "
        "bilinearly at each point; `mask` averages the map over each mask, weighting each position by the area of the "
        "mask in it.",
        examples=["avg", "cls+avg"],
    )
    roi_size: int = Field(
        default=ROI_SIZE,
        ge=1,
        le=64,
        description="With `pool=roi`: side of each pooled box; 1 gives a vector.",
        examples=[1],
    )
    project: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PROJECT,
        description="Project each row, flattened after pooling, to this many values, with the matrix of "
        "scikit-learn's `SparseRandomProjection(n_components=project, random_state=seed)` for rows of that length. "
        "Distances are approximately preserved.",
        examples=[4096],
    )
    seed: int = Field(
        default=0, ge=0, le=MAX_SEED, description="With `project`: seed of the projection matrix.", examples=[1]
    )
    tokens: _Tokens | None = Field(
        default=None,
        description="Without pooling: indices of the tokens to return, in this order; prefix tokens such as the class "
        "token come first. For attention weights, indices of the queries: `tokens=0` of `[N, heads, L, L]` is what "
        "the class token attends to, `[N, heads, 1, L]`. With attention windows, indices within each window.",
        examples=["0,57"],
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Dtype of floating-point outputs in the response; by default, the dtype they are computed in. "
        "Values outside the range of `float16` are an error.",
        examples=["float16"],
    )
    normalize: Normalize | None = Field(
        default=None,
        description="`l2` scales to unit length along the channels, after pooling and projection.",
        examples=["l2"],
    )
    preprocess: Preprocess = Field(
        default="default",
        description="`default` applies the weights' own transform to the decoded tensor, as torchvision documents it, "
        "unless the server is configured otherwise (see `GET /v1/models/{model}`); `pil` applies it to the PIL image; "
        "`fast` decodes large JPEG files at half or quarter size; `none` only scales pixels to [0, 1].",
        examples=["fast"],
    )
    encoding: Encoding = Field(
        default="json", description="Encoding of the values in a JSON response.", examples=["base64"]
    )


class OneStepQuery(FeatureQuery):
    """Query of a feature request that also specifies the extractor."""

    nodes: str = Field(
        min_length=1,
        max_length=65536,
        description="`node` or `node:key`, separated by commas; without keys, `*` stands for one component of a path.",
        examples=["layer3:C4,layer4:C5"],
    )
    weights: WeightsName = Field(default="DEFAULT", examples=["random"])
    inputs: str | None = Field(
        default=None,
        min_length=1,
        max_length=16384,
        description="Nodes to start from, separated by commas. The body must contain tensors with these names.",
        examples=["layer2"],
    )
    precision: Precision = Field(default="float32", examples=["bfloat16"])
    backend: Backend = Field(default="auto", examples=["eager"])
    image_size: ImageSizeText | None = Field(
        default=None,
        description="Size of the input in pixels: the side of a square, or `HEIGHTxWIDTH`; by default the weights' "
        "own. With `fit=native` it is one number, the length of the shorter side.",
        examples=["448x672"],
    )
    fit: UsedFit = Field(
        default="crop",
        description="How images are fitted to `image_size`, as in `POST /v1/extractors`. `stretch` and `pad` cannot "
        "be combined with `preprocess=none`, which does not resize images.",
        examples=["stretch"],
    )


_MASK = {
    "anyOf": [
        {"type": "string", "description": "A PNG file in base64."},
        {
            "type": "object",
            "properties": {
                "size": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 1},
                    "minItems": 2,
                    "maxItems": 2,
                    "description": "Height and width.",
                },
                "counts": {
                    "anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 0}}, {"type": "string"}],
                    "description": "Run lengths in column-major order, starting outside the mask.",
                },
            },
            "required": ["size", "counts"],
            "additionalProperties": False,
        },
    ]
}


_Lists = Annotated[list[Any], Field(max_length=MAX_IMAGES)] | None
"""A list for each image. Its items are checked elsewhere, because pydantic's errors would not name the image."""


def _numbers(count: int) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "number"}, "minItems": count, "maxItems": count}


def _listed(one: dict[str, Any]) -> WithJsonSchema:
    lists = {"type": "array", "maxItems": MAX_IMAGES, "items": {"type": "array", "items": one}}
    return WithJsonSchema({"anyOf": [lists, {"type": "null"}]})


_OneOrMore = Annotated[StrictFloat | list[StrictFloat], either("Input should be a number or a list of numbers")]


class NodeEdit(Strict):
    """A multiply-add of a node's value, as if returned by a forward hook: `value * scale + shift` where the selectors
    apply. A missing selector selects everything."""

    node: str = Field(
        min_length=1,
        max_length=MAX_NAME_LENGTH,
        description="Name of a node, as in `return_nodes`.",
        examples=["layer2"],
    )
    channels: list[StrictInt] | None = Field(
        default=None, description="Indices of channels; for attention weights, of heads.", examples=[[5, 17]]
    )
    tokens: list[StrictInt] | None = Field(
        default=None, description="Indices of tokens; prefix tokens such as the class token come first.", examples=[[0]]
    )
    box: list[StrictInt] | None = Field(
        default=None,
        description="`[x1, y1, x2, y2]` in positions of the map, or of the grid of tokens; x2 and y2 are exclusive.",
        examples=[[0, 0, 7, 14]],
    )
    scale: _OneOrMore = Field(
        default=1.0,
        description="Factor: a number, or one for each selected channel. 0 sets finite values to zero.",
        examples=[0],
    )
    shift: _OneOrMore = Field(
        default=0.0, description="Summand: a number, or one for each selected channel.", examples=[0.5]
    )
    images: list[StrictInt] | None = Field(
        default=None, description="Indices of images in the request.", examples=[[0]]
    )


class ImagesBody(Strict):
    """Encoded images as strings."""

    images: list[str] = Field(
        min_length=1,
        max_length=MAX_IMAGES,
        description="Encoded images, as base64 or as data URLs of base64. Other URLs are refused, never fetched.",
        examples=[["/9j/4AAQ…"]],
    )
    boxes: Annotated[_Lists, _listed(_numbers(4))] = Field(
        default=None,
        description="With `pool=roi`: for each image a list of boxes `[x1, y1, x2, y2]` in pixels of the image as "
        "sent, after its EXIF orientation. They are mapped through resize and crop.",
        examples=[[[[48, 32, 310, 290]]]],
    )
    points: Annotated[_Lists, _listed(_numbers(2))] = Field(
        default=None,
        description="With `pool=points`: for each image a list of points `[x, y]` in the same pixels.",
        examples=[[[[120.5, 88], [300, 41.25]]]],
    )
    masks: Annotated[_Lists, _listed(_MASK)] = Field(
        default=None,
        description="With `pool=mask`: for each image a list of masks, which have the image's size after EXIF "
        "orientation: a single-channel PNG file in base64 that is zero outside the mask, or a COCO run-length "
        "encoding with counts as numbers or as COCO's string.",
        examples=[[[{"size": [300, 451], "counts": [600, 90, 210, 134400]}]]],
    )
    edits: list[NodeEdit] = Field(
        default_factory=list,
        max_length=MAX_EDITS,
        description="Edits of inner values, applied in this order before later nodes are computed. Requests that edit "
        "the same nodes share batches, but never see each other's edits.",
        examples=[[{"node": "layer2", "channels": [5, 17], "scale": 0}]],
    )


class FeatureTensor(BaseModel):
    """One output tensor. Its first dimension is the images, or the regions with `pool=roi`, `points` or `mask`."""

    name: str = Field(
        description="Key of the output. With `pool=roi`, the output `box_image` is the index of each box's image, and "
        "likewise `point_image` and `mask_image`; with `fit=pad`, `valid_box` is the position of each row's image in "
        "the input, `[x1, y1, x2, y2]`.",
        examples=["C5"],
    )
    node: str | None = Field(
        description="Node of the output; null for additional outputs such as `box_image`.", examples=["layer4"]
    )
    shape: list[int] = Field(examples=[[1, 2048, 7, 7]])
    datatype: str = Field(examples=["FP32"])
    data: list[float | None] | list[int] | list[bool] | str = Field(
        description="The values in row-major order, with `null` for NaN and infinities, which JSON lacks; with "
        "`encoding=base64` the little-endian bytes as a base64 string.",
        examples=[[0.0, 0.3126, 1.0417]],
    )


class FeatureDocument(BaseModel):
    model: str = Field(examples=["resnet50"])
    extractor: str = Field(examples=["3f9a1c5be07d"])
    weights: str = Field(description="The weights used; `random` means untrained.", examples=["random"])
    images: int = Field(examples=[1])
    outputs: list[FeatureTensor]
