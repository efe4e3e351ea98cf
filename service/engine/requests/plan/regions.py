"""Places the regions of a request on the feature maps, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from fxcore.images.placement import Placement
from fxcore.pooling import pooled_regions_shape
from service.engine.options import PROBLEMS
from service.engine.requests.plan.plan import Plan, indexed, spread
from service.engine.requests.plan.sizes import row_size
from service.engine.rows.regions import Regions, carried
from service.engine.runtime.runtime import Runtime
from service.schemas.regions import KINDS, GivenRegions

_MAX_SAMPLES = 2**31
"""Maximum values of maps that the regions of a request may sample: others wait while they are pooled."""

_MAX_MASK_PIXELS = 2**29
"""Maximum pixels of all masks of a request: each is read as often as the extractor has maps of different sizes."""

_IMAGES_AT_ONCE = 64
"""Images whose boxes or points are carried at a time."""


def region_steps(given: GivenRegions) -> list[range]:
    """Image indices in groups: regions of a group are carried before it is another request's turn."""
    return spread(len(given.of_images), 1 if given.pool == "mask" else _IMAGES_AT_ONCE)


def check_regions(plan: Plan, given: GivenRegions) -> list[Placement]:
    """Return where the images are in their rows.

    Raises:
        BadBox, BadPoint, BadMask: there is no list for each image, or there are too many pixels in all masks.
    """
    kind, problem = KINDS[given.pool], PROBLEMS[given.pool]
    placements = list(plan.placements())
    if len(given.of_images) != len(placements):
        raise problem(
            f"{kind.field} needs a list for each image, {len(placements)} in all, and has {len(given.of_images)}: give "
            f"an empty list for an image without {kind.field}"
        )
    if given.pool == "mask":
        pixels = sum(math.prod(p.image) * len(of) for p, of in zip(placements, given.of_images, strict=True))
        if pixels > _MAX_MASK_PIXELS:
            raise problem(
                f"the masks have {pixels:,} pixels in all, and at most {_MAX_MASK_PIXELS:,} are taken in one request: "
                "send fewer at a time"
            )
    return placements


def carry(
    runtime: Runtime, plan: Plan, given: GivenRegions, placements: Sequence[Placement], indices: range
) -> list[Mapping[str, Tensor]]:
    """Carry the regions of some images, in pixels of these as sent, over to the model's input and its maps.

    Raises:
        BadBox, BadPoint, BadMask: one is wrong; ``index`` and ``box``, ``point`` or ``mask`` in ``extra`` say which.
    """
    placed = []
    for index in indices:
        with indexed(index):
            grids = row_size(runtime, plan.shapes[index]).grids
            placed.append(carried(given.pool, placements[index], given.of_images[index], grids))
    return placed


def regions_of(
    runtime: Runtime, plan: Plan, given: GivenRegions, placed: Sequence[Mapping[str, Tensor]], roi_size: int
) -> Regions:
    """Return the regions of a request.

    Args:
        placed: of all images, by :func:`carry`.
        roi_size: positions a side of what each box becomes.

    Raises:
        BadBox, BadPoint, BadMask: pooling all of them takes too long.
    """
    rows = [row_size(runtime, shape) for shape in plan.shapes]
    counts = [len(of_image) for of_image in given.of_images]
    samples = 0
    for row, of_image, count in zip(rows, placed, counts, strict=True):
        for info in runtime.outputs:
            if (grid := row.grids.get(info.key)) is not None:
                channels = pooled_regions_shape(row.outputs[info.key][0], info.layout, 1)[1]
                each = {"points": 4, "mask": grid.height * grid.width}
                sampled = (
                    grid.samples(of_image[info.key], roi_size) if given.pool == "roi" else count * each[given.pool]
                )
                samples += channels * sampled
    if samples > _MAX_SAMPLES:
        field = KINDS[given.pool].field
        raise PROBLEMS[given.pool](
            f"pooling these {field} takes {samples:,} values of the maps, and at most {_MAX_SAMPLES:,} are taken in "
            f"one request: send fewer or smaller {field}, or ask for a coarser level"
        )
    return Regions(counts, placed, [row.grids for row in rows])
