"""JSON bodies of graph transforms."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class TransformDetail(BaseModel):
    """A graph transform."""

    name: str = Field(examples=["remove"])
    description: str = Field(examples=["Remove operations that do nothing in eval mode."])
    parameters: dict[str, dict[str, Any]] = Field(
        description="JSON Schema of each parameter; those without a `default` are required.",
        examples=[{"dropout": {"type": "boolean", "default": True}}],
    )
    exact: bool = Field(description="Whether it preserves the values, up to rounding.", examples=[True])
    changes_input: bool = Field(
        description="Whether it changes the model's input, and with it the extractor's preprocessing.", examples=[False]
    )
    adds_nodes: bool = Field(
        description="Whether it adds nodes that `return_nodes` may name; such transforms run first.", examples=[False]
    )


class TransformList(BaseModel):
    transforms: list[TransformDetail]
