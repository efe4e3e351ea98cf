"""What goes over the wire when features are asked for and answered under ``/v1``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from service.schemas.v1 import Backend, Precision, WeightsName

MAX_IMAGES = 1024
"""The most images a request may hold, in whatever form it has them as a list."""

MAX_DIMENSIONS = 8
"""The most dimensions a tensor of a request may have: more than any model takes."""

MAX_BOXES = 16384
"""The most boxes a request may hold."""

ROI_SIZE = 7
"""Positions a side of what `pool=roi` makes of a box, where the request does not say."""

Pool = Literal["none", "avg", "max", "gem", "cls", "roi"]
FeatureDtype = Literal["float32", "float16", "bfloat16"]
Normalize = Literal["l2"]
Preprocess = Literal["default", "pil", "fast", "none"]
Encoding = Literal["json", "base64"]


class FeatureQuery(BaseModel):
    """The query of a request for features."""

    pool: Pool = Field(
        default="none",
        description="Make one vector an image of each map; `roi`: a small map of each of the boxes in a JSON body, by "
        "`torchvision.ops.roi_align`.",
        examples=["avg"],
    )
    roi_size: int = Field(
        default=ROI_SIZE,
        ge=1,
        le=64,
        description="With `pool=roi`: positions a side of what each box becomes; 1 makes it a vector.",
        examples=[1],
    )
    dtype: FeatureDtype | None = Field(
        default=None, description="Of floating outputs in the answer; as computed without it.", examples=["float16"]
    )
    normalize: Normalize | None = Field(
        default=None, description="`l2`: unit length over the channels.", examples=["l2"]
    )
    preprocess: Preprocess = Field(
        default="default",
        description="`default` is the weights' own transform of the decoded tensor, as torchvision documents it, "
        "unless the server is set to another, which `GET /v1/models/{model}` says; `pil` is that of the PIL image; "
        "`fast` decodes large JPEG files at a half or a quarter, on CUDA with less exact colours; `none` only scales "
        "pixels to [0, 1].",
        examples=["fast"],
    )
    encoding: Encoding = Field(default="json", description="Of the data in a JSON answer.", examples=["base64"])


class OneStepQuery(FeatureQuery):
    """The query of a request for features that names the extractor too."""

    nodes: str = Field(
        min_length=1,
        max_length=65536,
        description="`node` or `node:key`, separated by commas.",
        examples=["layer3:C4,layer4:C5"],
    )
    weights: WeightsName = Field(default="DEFAULT", examples=["random"])
    precision: Precision = Field(default="float32", examples=["bfloat16"])
    backend: Backend = Field(default="auto", examples=["eager"])
    image_size: int | None = Field(default=None, ge=1, le=4096, examples=[320])


class ImagesBody(BaseModel):
    """Encoded images as base64 strings."""

    model_config = ConfigDict(extra="forbid")

    images: list[str] = Field(
        min_length=1,
        max_length=MAX_IMAGES,
        description="Base64 of one encoded image each.",
        examples=[["/9j/4AAQ…"]],
    )
    boxes: (
        Annotated[
            list[Any],
            Field(max_length=MAX_IMAGES),
            WithJsonSchema(
                {
                    "type": "array",
                    "maxItems": MAX_IMAGES,
                    "items": {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4},
                    },
                }
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="With `pool=roi`: for each image a list of boxes `[x1, y1, x2, y2]`, in its pixels as it was sent, "
        "after its EXIF orientation. Each is carried through resize and crop.",
        examples=[[[[48, 32, 310, 290]]]],
    )


class FeatureTensor(BaseModel):
    """One output tensor; the first dimension is the number of images, with `pool=roi` that of boxes."""

    name: str = Field(
        description="Its key. With `pool=roi` there is also `box_image`: whose image each box is of.", examples=["C5"]
    )
    node: str | None = Field(description="null for `box_image`, which is of no node.", examples=["layer4"])
    shape: list[int] = Field(examples=[[1, 2048, 7, 7]])
    datatype: str = Field(examples=["FP32"])
    data: list[float | None] | list[int] | list[bool] | str = Field(
        description="Flat and row-major, `null` for NaN and infinities, which JSON has no numbers for; with "
        "`encoding=base64` a base64 string of the little-endian bytes.",
        examples=[[0.0, 0.3126, 1.0417]],
    )


class FeatureDocument(BaseModel):
    model: str = Field(examples=["resnet50"])
    extractor: str = Field(examples=["3f9a1c5be07d"])
    weights: str = Field(description="`random` where the values come from untrained weights.", examples=["random"])
    images: int = Field(examples=[1])
    outputs: list[FeatureTensor]
