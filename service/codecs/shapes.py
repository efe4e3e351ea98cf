"""Shapes as requests write them, checked before anything takes that shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from service.problems import Refusal
from service.schemas import MAX_DIMENSIONS

# Of items of up to 16 bytes. numpy and torch count bytes in 63 bits, and leave sizes of 0 out while they do.
_MAX_ELEMENTS = 2**56


def check(shape: Sequence[Any], where: str) -> None:
    """
    Raises:
        Refusal: 422 ``bad-tensor``: there are more dimensions than are taken, a size is no whole number from 0, or the
            others than 0 make more elements than an array can have. ``where`` says what has the shape.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise Refusal("bad-tensor", f"{where} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are taken")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise Refusal("bad-tensor", f"{where} has a size that is not a whole number from 0")
    if math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
        raise Refusal("bad-tensor", f"{where} has sizes that no array can have")
