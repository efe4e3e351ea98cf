"""Limits on inputs with ``fit=native``, whose size depends on each image."""

from __future__ import annotations

from collections.abc import Sequence

from fxcore.errors import ImageTooLarge
from service.engine.description import Description
from service.engine.requests.plan.plan import indexed
from service.engine.rows.shapes import RowShape
from service.schemas.image_size import MAX_SIDE

_MAX_PATCHES = 16_384
"""Maximum patches per image for models built for one size. Most have attention, whose time grows with the square of the
number of patches. A 2048-pixel square has this many 16-pixel patches."""


def check_native(description: Description, shapes: Sequence[RowShape], resized: bool) -> None:
    """Check input sizes with ``fit=native``, before anything is decoded.

    Args:
        description: the extractor's description.
        shapes: shapes of the rows.
        resized: whether preprocessing resizes the images to these shapes. Otherwise they were sent like that.

    Raises:
        ImageTooLarge: a side would exceed :data:`~service.schemas.image_size.MAX_SIDE`, or there would be too many
            patches; ``extra["index"]`` is the image's index.
    """
    if description.spec.fit != "native":
        return
    multiple = description.preprocessing.describe()["multiple"]
    for index, shape in enumerate(shapes):
        height, width = shape[0][-2:]
        limits = {MAX_SIDE * min(height, width): f"no side may exceed {MAX_SIDE}"}
        if description.entry.one_size:
            limits[_MAX_PATCHES * multiple**2] = f"at most {_MAX_PATCHES:,} squares of {multiple} pixels are allowed"
        limit = min(limits)
        if height * width > limit:
            with indexed(index):
                smaller = "ask for fit=crop or fit=pad, for a smaller image_size" if resized else "send a smaller one"
                raise ImageTooLarge(
                    f"with fit=native the model's input would have {width} x {height} pixels, and {limits[limit]}: "
                    f"{smaller}, or cut the image into pieces",
                    pixels=height * width,
                    limit=limit,
                )
