"""Regions of images that a request pools: boxes, points or masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.choices import RegionPooling


class Kind(NamedTuple):
    """The names of a kind of region.

    Attributes:
        field: field of a JSON body, with a list for each image.
        one: a single region: the column of ``fxserve extract``, and the field of a problem with its index.
        form: how a region is written.
    """

    field: str
    one: str
    form: str

    @property
    def output(self) -> str:
        """Name of the output with the index of each region's image."""
        return f"{self.one}_image"


KINDS: Mapping[str, Kind] = {
    "roi": Kind("boxes", "box", "[x1, y1, x2, y2]"),
    "points": Kind("points", "point", "[x, y]"),
    "mask": Kind("masks", "mask", 'a PNG file in base64 or {"size": [height, width], "counts": COCO\'s run lengths}'),
}
"""Kinds of regions, by pooling."""


@dataclass(frozen=True)
class GivenRegions:
    """The regions of a request, in pixels of its images as sent.

    Attributes:
        pool: the pooling of the regions.
        of_images: for each image, its regions: boxes ``x1, y1, x2, y2``, points ``x, y``, or masks as
            :data:`fxcore.images.masks.Mask`.
    """

    pool: RegionPooling
    of_images: Sequence[Sequence[Any]]
