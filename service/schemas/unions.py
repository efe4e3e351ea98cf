"""Errors of fields that may have one of several types."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError


def either(expected: str) -> WrapValidator:
    """Return a validator of a union that reports the errors of one member, without its name.

    pydantic reports the errors of all members, under Python's names of their types, which clients do not know. Kept are
    those of the member whose type was sent and whose parts are wrong. If there is none, the error is ``expected``, such
    as ``Input should be a number or a list of numbers``.
    """

    def validated(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            members: dict[str | int, list[InitErrorDetails]] = {}
            others = set()
            for found in error.errors(include_url=False):
                member, *path = found["loc"]
                if not path:
                    others.add(member)
                kind = PydanticCustomError(found["type"], "{why}", {**found.get("ctx", {}), "why": found["msg"]})
                inner = InitErrorDetails(type=kind, loc=tuple(path), input=found["input"])
                members.setdefault(member, []).append(inner)
            for member in members.keys() - others:
                raise ValidationError.from_exception_data(error.title, members[member]) from None
            raise PydanticCustomError("union", "{why}", {"why": expected}) from None

    return WrapValidator(validated)
