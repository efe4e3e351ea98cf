"""Queries of attributions under ``/v1``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from service.choices import Attribution, Fit, Preprocess
from service.schemas.image_size import ImageSizeText
from service.schemas.specs import MAX_NAME_LENGTH, WeightsName
from service.schemas.v1.features import Encoding, FeatureDocument


class AttributionQuery(BaseModel):
    """Query of an attribution."""

    of: str = Field(
        min_length=1, max_length=MAX_NAME_LENGTH, description="A node with one vector an image.", examples=["fc"]
    )
    target: int | Literal["max"] = Field(
        default="max",
        description="Index of the result that is attributed; `max` is the largest of each image.",
        examples=[281],
    )
    at: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME_LENGTH,
        description="The node whose values it is attributed to; by default the model's input, which `gradcam` cannot "
        "take.",
        examples=["layer4"],
    )
    method: Attribution = Field(
        default="gradcam",
        description="`gradient` is that of the result by the values; `gradcam` the positive part of the channels' sum "
        "weighted by their mean gradients, `[n, H, W]`; `integrated_gradients` goes from zeros to the values.",
        examples=["gradient"],
    )
    steps: int = Field(default=20, ge=1, le=100, description="Passes of `integrated_gradients`.", examples=[50])
    preprocess: Preprocess = Field(default="default", description="As for features.", examples=["pil"])
    encoding: Encoding = Field(
        default="json", description="Encoding of the values in a JSON response.", examples=["base64"]
    )


class AttributionDocument(FeatureDocument):
    """An attribution; its output is ``attribution``."""

    method: str = Field(examples=["gradcam"])
    backend: Literal["eager"] = Field(description="What computed it.", examples=["eager"])
    targets: list[int] = Field(description="Index of the result of each image.", examples=[[281]])


class OneStepAttributionQuery(AttributionQuery):
    """Query of an attribution in a model."""

    weights: WeightsName = Field(default="DEFAULT", examples=["random"])
    image_size: ImageSizeText | None = Field(default=None, description="As for features.", examples=["448x672"])
    fit: Fit = Field(default="crop", description="As for features, but for `native`.", examples=["stretch"])
