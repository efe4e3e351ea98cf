"""The limit on inputs under ``fit=native``, whose size each image decides."""

from __future__ import annotations

from collections.abc import Sequence

from fxcore.errors import ImageTooLarge
from service.engine.description import Description
from service.engine.requests.plan.plan import indexed
from service.engine.rows.shapes import RowShape
from service.schemas.image_size import MAX_SIDE

_MAX_PATCHES = 16_384
"""Maximum patches of an image, of models that are built for one size: most have attention, whose time grows with the
square of their number. As many as a square of 2048 pixels has of patches of 16."""


def check_native(description: Description, shapes: Sequence[RowShape], resized: bool) -> None:
    """Check the sizes of inputs under ``fit=native``, before anything is decoded.

    Args:
        description: of the extractor.
        shapes: of the rows.
        resized: whether preprocessing resizes the images to these shapes; others were sent so.

    Raises:
        ImageTooLarge: a side would be over :data:`~service.schemas.image_size.MAX_SIDE`, or there would be too many
            patches; ``index`` in ``extra`` says of which image.
    """
    if description.spec.fit != "native":
        return
    multiple = description.preprocessing.describe()["multiple"]
    for index, shape in enumerate(shapes):
        height, width = shape[0][-2:]
        limits = {MAX_SIDE * min(height, width): f"no side may be over {MAX_SIDE}"}
        if description.entry.one_size:
            limits[_MAX_PATCHES * multiple**2] = f"at most {_MAX_PATCHES:,} squares of {multiple} pixels are taken"
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
