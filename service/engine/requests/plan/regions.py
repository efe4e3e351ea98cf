"""Placement of a request's regions on the feature maps, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from torch import Tensor

from fxcore.images.placement import Placement
from fxcore.pooling import pooled_regions_shape
from service.engine.options import PROBLEMS
from service.engine.requests.plan.plan import Plan, indexed, spread
from service.engine.requests.plan.sizes import row_size
from service.engine.rows.regions import Regions
from service.engine.runtime.runtime import Runtime
from service.engine.threads import in_pool
from service.schemas.regions import KINDS, GivenRegions

_MAX_SAMPLES = 2**31
"""Maximum map values that the regions of a request may sample: other requests wait while they are pooled."""

_MAX_MASK_PIXELS = 2**29
"""Maximum pixels of all masks of a request: each mask is read once for every map size of the extractor."""

_IMAGES_AT_ONCE = 64
"""Number of images whose boxes or points are mapped at a time."""


async def placed_regions(runtime: Runtime, plan: Plan, given: GivenRegions, roi_size: int, intake: Executor) -> Regions:
    """Place the regions ``given`` for a request's images on the feature maps, in the threads of ``intake``.

    Raises:
        BadBox, BadPoint, BadMask: see :func:`check_regions`, :func:`carry` and :func:`regions_of`.
    """
    for shape in set(plan.shapes):
        await in_pool(intake, row_size, runtime, shape)
    placements = check_regions(plan, given)
    placed: list[Mapping[str, Tensor]] = []
    # In steps, so that other requests are served in between.
    for indices in spread(len(given.of_images), 1 if given.pool == "mask" else _IMAGES_AT_ONCE):
        placed += await in_pool(intake, carry, runtime, plan, given, placements, indices)
    return await in_pool(intake, regions_of, runtime, plan, given, placed, roi_size)


def check_regions(plan: Plan, given: GivenRegions) -> list[Placement]:
    """Check the number and size of the regions, and return the placement of each image in its row.

    Raises:
        BadBox, BadPoint, BadMask: there is not one list per image, or the masks have too many pixels in total.
    """
    kind, problem = KINDS[given.pool], PROBLEMS[given.pool]
    placements = list(plan.placements())
    if len(given.of_images) != len(placements):
        raise problem(
            f"{kind.field} must have one list per image, {len(placements)} in all, not {len(given.of_images)}: give "
            f"an empty list for an image without {kind.field}"
        )
    if given.pool == "mask":
        pixels = sum(math.prod(p.image) * len(of) for p, of in zip(placements, given.of_images, strict=True))
        if pixels > _MAX_MASK_PIXELS:
            raise problem(
                f"the masks have {pixels:,} pixels in all, and at most {_MAX_MASK_PIXELS:,} are allowed in one "
                "request: send fewer at a time"
            )
    return placements


def carry(
    runtime: Runtime, plan: Plan, given: GivenRegions, placements: Sequence[Placement], indices: range
) -> list[Mapping[str, Tensor]]:
    """Map the regions of some images, given in pixels of the images as sent, to the model's input and its maps.

    Raises:
        BadBox, BadPoint, BadMask: one is invalid; ``index`` and ``box``, ``point`` or ``mask`` in ``extra`` identify
            it.
    """
    placed: list[Mapping[str, Tensor]] = []
    for index in indices:
        grids = row_size(runtime, plan.shapes[index]).grids
        placement, of_image = placements[index], given.of_images[index]
        with indexed(index):
            if given.pool == "mask":
                distinct = {replace(grid, prefix=0) for grid in grids.values()}
                weights = dict(zip(distinct, placement.carry_masks(of_image, list(distinct)), strict=True))
                placed.append({key: weights[replace(grid, prefix=0)] for key, grid in grids.items()})
            else:
                one = placement.carry(of_image) if given.pool == "roi" else placement.carry_points(of_image)
                placed.append(dict.fromkeys(grids, one))
    return placed


def regions_of(
    runtime: Runtime, plan: Plan, given: GivenRegions, placed: Sequence[Mapping[str, Tensor]], roi_size: int
) -> Regions:
    """Return the regions of a request.

    Args:
        placed: the mapped regions of all images, from :func:`carry`.
        roi_size: positions per side of each pooled box.

    Raises:
        BadBox, BadPoint, BadMask: pooling all of them would take too long.
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
            f"pooling these {field} needs {samples:,} values of the maps, and at most {_MAX_SAMPLES:,} are allowed in "
            f"one request: send fewer or smaller {field}, or ask for a coarser level"
        )
    return Regions(counts, placed, [row.grids for row in rows])
