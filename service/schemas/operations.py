"""JSON bodies of health and readiness."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    ready: bool = Field(examples=[True])
    reason: str = Field(examples=["ready"])
