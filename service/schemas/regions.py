"""The parts of images that a request pools: boxes, points or masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.choices import RegionPooling


class Kind(NamedTuple):
    """How a kind of region is called.

    Attributes:
        field: of a JSON body, with a list for each image.
        one: of them: the column of ``fxserve extract``, and the field of a problem with its index.
        form: how one is written.
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
"""By the pooling that takes them."""


@dataclass(frozen=True)
class GivenRegions:
    """The regions of a request, in pixels of its images as sent.

    Attributes:
        pool: the pooling that takes them.
        of_images: for each image its regions: boxes ``x1, y1, x2, y2``, points ``x, y``, or masks as
            :data:`fxcore.images.masks.Mask`.
    """

    pool: RegionPooling
    of_images: Sequence[Sequence[Any]]
