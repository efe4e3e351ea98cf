"""Checks of shapes in requests, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from service.problems import BadTensor
from service.schemas.v1.features import MAX_DIMENSIONS

# numpy and torch count bytes in 63 bits, ignoring sizes of 0; an element has at most 16 bytes.
_MAX_ELEMENTS = 2**56


def check(shape: Sequence[Any], where: str) -> None:
    """Check a shape in a request; ``where`` names its tensor in the error.

    Raises:
        Problem: 422 ``bad-tensor``: too many dimensions, a size that is not a whole number from 0, or more elements
            (with 0 counted as 1) than an array can have.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise BadTensor(f"{where} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are allowed")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise BadTensor(f"{where} has an invalid size; sizes must be whole numbers, at least 0")
    if math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
        raise BadTensor(f"{where} has sizes that are too large for an array")
