"""Validation of the boxes, points or masks of a JSON body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fxcore.images.masks import Mask, Rle
from service.choices import RegionPooling
from service.codecs.requests import image_text
from service.problems import BadBox, BadMask, BadPoint, InvalidRequest, Problem
from service.schemas.regions import KINDS, GivenRegions
from service.schemas.v1.features import MAX_REGIONS, ImagesBody

_NUMBERS: dict[RegionPooling, tuple[type[Problem], str]] = {"roi": (BadBox, "four"), "points": (BadPoint, "two")}


def read(body: ImagesBody) -> GivenRegions | None:
    """Return the regions of ``body``; None if it has none.

    Raises:
        Problem: they are of several kinds, too many, or not one list per image.
    """
    fields: dict[RegionPooling, list[Any] | None] = {"roi": body.boxes, "points": body.points, "mask": body.masks}
    found = [(pool, lists) for pool, lists in fields.items() if lists is not None]
    if not found:
        return None
    if len(found) > 1:
        raise InvalidRequest("a body may have only one of boxes, points and masks; send the others in another request")
    ((pool, lists),) = found
    if sum(len(of_image) for of_image in lists if isinstance(of_image, list)) > MAX_REGIONS:
        raise InvalidRequest(f"the body has more than {MAX_REGIONS} {KINDS[pool].field}; send fewer at a time")
    return given(pool, lists)


def given(pool: RegionPooling, lists: Sequence[Any]) -> GivenRegions:
    """Validate the regions of images in JSON form.

    Raises:
        Problem: there is not one list per image, or a region is malformed.
    """
    problem = BadMask if pool == "mask" else _NUMBERS[pool][0]
    kind = KINDS[pool]
    for index, of_image in enumerate(lists):
        if not isinstance(of_image, list):
            raise problem(f"image {index}: its {kind.field} must be a list of {kind.form}", index=index)
    if pool == "mask":
        return GivenRegions(pool, [_masks(of_image, index) for index, of_image in enumerate(lists)])
    for index, of_image in enumerate(lists):
        for place, one in enumerate(of_image):
            if not isinstance(one, list) or not all(type(x) in (int, float) and math.isfinite(x) for x in one):
                wanted = f"is not {_NUMBERS[pool][1]} finite numbers: write {kind.form}"
                raise problem(f"image {index}: {kind.one} {place} {wanted}", None, index=index, **{kind.one: place})
    return GivenRegions(pool, lists)


def _masks(of_image: Sequence[Any], index: int) -> list[Mask]:
    masks = []
    for place, one in enumerate(of_image):
        try:
            masks.append(_mask(one))
        except ValueError as error:
            raise BadMask(
                f"image {index}: mask {place} {error}: send {KINDS['mask'].form}", index=index, mask=place
            ) from error
    return masks


def _mask(one: Any) -> Mask:
    """Parse a mask of a body.

    Raises:
        ValueError: it is not a mask; the message says what it is.
    """
    if isinstance(one, str):
        return image_text.decode_one(one)
    if not isinstance(one, dict) or set(one) != {"size", "counts"}:
        raise ValueError("is neither base64 nor run lengths")
    size, counts = one["size"], one["counts"]
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise ValueError("has run lengths without the size of their image")
    if not isinstance(counts, str) and not (isinstance(counts, list) and all(type(count) is int for count in counts)):
        raise ValueError("has run lengths that are neither a list of whole numbers nor a string")
    return Rle(size[0], size[1], counts)
