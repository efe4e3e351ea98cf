"""The JSON body of errors under ``/v1``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Problem(BaseModel):
    """An error (RFC 9457); each type may add fields of its own."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["/problems/unknown-node"])
    title: str = Field(examples=["Unknown node"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["resnet50 has no node 'layer5'; did you mean layer4?"])
