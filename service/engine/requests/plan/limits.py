"""Limits on the sizes of images once they are resized, before anything is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxcore.errors import BadImage, ImageTooLarge
from service.engine.description import Description
from service.engine.requests.plan.plan import Plan
from service.engine.rows.shapes import ABOUT_USUAL, LARGEST_ROW, RowShape, RowSize, row_values
from service.schemas.image_size import MAX_PATCHES, MAX_SIDE

_MAX_UPSCALE = 8
"""Pixels that any image may be resized to, as a multiple of the pixels of the model's input. For a model that crops 224
pixels out of 256, it allows an aspect ratio of about 6:1."""


def check_sizes(description: Description, plan: Plan, max_pixels: int) -> None:
    """Check the sizes of a request's images during preprocessing, and of its rows with ``fit=native``.

    Raises:
        ImageTooLarge: an image would be resized to more than ``max_pixels`` and the limit for common aspect ratios;
            with ``fit=native``, a side would exceed :data:`~service.schemas.image_size.MAX_SIDE`, or there would be too
            many patches. ``extra["index"]`` is its index.
        BadImage: an image is so narrow that resizing leaves no pixels, as a detector's may.
    """
    preprocessing = description.preprocessing
    # A model may resize even small images to more than max_pixels; reject only extreme aspect ratios.
    limit = max(max_pixels, _MAX_UPSCALE * math.prod(preprocessing.nominal_size()))
    for (height, width), index in plan.sent.items():
        size = preprocessing.largest_size(height, width)
        pixels = math.prod(size)
        if 0 < pixels <= limit:
            continue
        sizes = f"the image has {width} x {height} pixels, and"
        if not pixels:
            detail = f"image {index}: {sizes} would have {size[1]} x {size[0]} after resizing"
            raise BadImage(detail, index=index)
        detail = f"{sizes} {size[1]} x {size[0]} = {pixels} after resizing; at most {limit} are allowed"
        raise _too_large(index, detail, pixels, limit)
    if description.spec.fit != "native":
        return
    multiple = preprocessing.describe()["multiple"]
    for part in plan.parts:
        height, width = part.shape[0][-2:]
        limits = {MAX_SIDE * min(height, width): f"no side may exceed {MAX_SIDE}"}
        if description.entry.one_size:
            limits[MAX_PATCHES * multiple**2] = f"at most {MAX_PATCHES:,} squares of {multiple} pixels are allowed"
        limit = min(limits)
        if height * width > limit:
            detail = (
                f"with fit=native the model's input would have {width} x {height} pixels, and {limits[limit]}: "
                f"{_instead(plan)}"
            )
            raise _too_large(part.rows.start, detail, height * width, limit)


def check_rows(description: Description, plan: Plan, sizes: Mapping[RowShape, RowSize], max_batch_bytes: int) -> None:
    """Check the memory to compute each row of a request.

    Rows of about the usual size are computed even if they need more: models may be larger than the limit expects.

    Raises:
        ImageTooLarge: a row needs more than :data:`~service.engine.rows.shapes.LARGEST_ROW` times ``max_batch_bytes``;
            ``extra["index"]`` is its index.
    """
    limit = LARGEST_ROW * max_batch_bytes
    for part in plan.parts:
        taken = sizes[part.shape].bytes
        if taken <= limit:
            continue
        # An image_size of the client's is checked when its extractor is created, unless that begins at inner nodes.
        usual = 0 if description.begins_at and description.spec.image_size else row_values(description.usual_shapes())
        if row_values(part.shape) > ABOUT_USUAL * usual:
            pixels = math.prod(part.shape[0][-2:])
            shown = ", ".join(" x ".join(map(str, dims)) for dims in part.shape)
            detail = (
                f"computing an input of {shown} would need {taken:,} bytes of memory, and it may need {limit:,} "
                f"({LARGEST_ROW} x FXSERVE_MAX_BATCH_BYTES): {_instead(plan)}"
            )
            raise _too_large(part.rows.start, detail, pixels, pixels * limit // taken)


def _too_large(index: int, detail: str, pixels: int, limit: int) -> ImageTooLarge:
    return ImageTooLarge(f"image {index}: {detail}", pixels=pixels, limit=limit, index=index)


def _instead(plan: Plan) -> str:
    smaller = "ask for fit=crop or fit=pad, for a smaller image_size" if plan.sent else "send a smaller one"
    return f"{smaller}, or cut the image into pieces"
