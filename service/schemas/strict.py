"""Bodies whose unknown fields are refused with the known ones, so that a typo is not ignored silently."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class Strict(BaseModel):
    """A model without unknown fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, given: Any) -> Any:
        known = list(cls.model_fields)
        unknown = [name for name in given if name not in known] if isinstance(given, dict) else []
        if unknown:  # before a field that is missing because its name was mistyped
            why = f"unknown field, {expected(unknown[0], known)}"
            message = PydanticCustomError("unknown_field", "{why}", {"why": why})
            error = InitErrorDetails(type=message, loc=(unknown[0],), input=given[unknown[0]])
            raise ValidationError.from_exception_data(cls.__name__, [error])
        return given


def expected(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: those that are known, and a similar one.

    >>> expected("nods", ["model", "nodes"])
    "expected one of model, nodes; did you mean 'nodes'?"
    """
    near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.65)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected one of {', '.join(known)}{hint}"
