"""The input size of a model in specs and queries: a side, or height and width."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_SIDE = 4096

MAX_PATCHES = 16_384
"""Maximum patches per image for models built for one size. Most have attention, whose time grows with the square of the
number of patches. A 2048-pixel square has this many 16-pixel patches."""

_TEXT = re.compile(r"([0-9]{1,5})(?:x([0-9]{1,5}))?")


def _size(value: Any) -> int | tuple[int, int]:
    listed = isinstance(value, (list, tuple))
    sides = list(value) if listed else [value]
    if (listed and len(sides) != 2) or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides):
        raise PydanticCustomError(
            "image_size",
            "Input should be a side or [height, width], in whole pixels from 1 to {most}",
            {"most": MAX_SIDE},
        )
    return sides[0] if sides[0] == sides[-1] else (sides[0], sides[1])


def parse_size(value: Any) -> int | tuple[int, int]:
    """Parse a size: ``"448"``, ``"448x672"``, or the JSON form.

    Raises:
        ValueError: it is not a size.
    """
    if not isinstance(value, str):
        return _size(value)
    match = _TEXT.fullmatch(value)
    if match is None:
        raise PydanticCustomError("image_size", "Input should be a side or HEIGHTxWIDTH, such as 448 or 448x672", {})
    height, width = match.groups()
    return _size(int(height) if width is None else [int(height), int(width)])


_SIDE = {"type": "integer", "minimum": 1, "maximum": MAX_SIDE}

ImageSize = Annotated[
    int | tuple[int, int],
    BeforeValidator(_size),
    WithJsonSchema({"anyOf": [_SIDE, {"type": "array", "items": _SIDE, "minItems": 2, "maxItems": 2}]}),
]
"""In JSON: ``448`` or ``[448, 672]``. Equal height and width become one number."""

ImageSizeText = Annotated[
    int | tuple[int, int],
    BeforeValidator(parse_size),
    WithJsonSchema({"type": "string", "pattern": r"^[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})?$"}),
]
"""In a query or a command: ``448`` or ``448x672``."""
