"""Queries of attributions under ``/v1``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from service.choices import Attribution, Preprocess
from service.schemas.image_size import ImageSizeText
from service.schemas.specs import MAX_NAME_LENGTH, WeightsName
from service.schemas.unions import either
from service.schemas.v1.features import Encoding, FeatureDocument, UsedFit

_Target = Annotated[int | Literal["max"], either("give the index of a result, or max")]


class AttributionQuery(BaseModel):
    """Query of an attribution."""

    of: str = Field(
        min_length=1,
        max_length=MAX_NAME_LENGTH,
        description="Node whose result is explained; it must give one vector per image.",
        examples=["fc"],
    )
    target: _Target = Field(
        default="max",
        description="Index of the value in `of` to explain; `max` selects the largest value of each image.",
        examples=[281],
    )
    at: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME_LENGTH,
        description="Node whose values the result is attributed to. The default is the model's input, which `gradcam` "
        "does not support.",
        examples=["layer4"],
    )
    method: Attribution = Field(
        default="gradcam",
        description="`gradient` is the gradient of the result with respect to the values; `gradcam` is the positive "
        "part of the sum of the channels, weighted by their mean gradients, `[n, H, W]`; `integrated_gradients` "
        "integrates gradients from zeros to the values.",
        examples=["gradient"],
    )
    steps: int = Field(
        default=20, ge=1, le=100, description="Number of steps of `integrated_gradients`.", examples=[50]
    )
    preprocess: Preprocess = Field(default="default", description="As for features.", examples=["pil"])
    encoding: Encoding = Field(
        default="json", description="Encoding of the values in a JSON response.", examples=["base64"]
    )


class AttributionDocument(FeatureDocument):
    """An attribution. Its output is named ``attribution``; with ``fit=pad``, ``valid_box`` is added as for features."""

    method: str = Field(examples=["gradcam"])
    backend: Literal["eager"] = Field(description="Backend that computed the attribution.", examples=["eager"])
    targets: list[int] = Field(description="Index of the explained value, for each image.", examples=[[281]])


class OneStepAttributionQuery(AttributionQuery):
    """Query of an attribution in a model."""

    weights: WeightsName = Field(default="DEFAULT", examples=["random"])
    image_size: ImageSizeText | None = Field(default=None, description="As for features.", examples=["448x672"])
    fit: UsedFit = Field(
        default="crop", description="As for features, except that `native` is not supported.", examples=["stretch"]
    )
