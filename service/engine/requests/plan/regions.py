"""Placement of a request's regions on the feature maps, before anything is computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch
from torch import Tensor

from fxcore.errors import FxError
from fxcore.extractor import OutputInfo
from fxcore.pooling import MapGrid, pooled_regions_shape
from service.engine.options import PROBLEMS
from service.engine.requests.plan.plan import Plan, of_image
from service.engine.rows.regions import Regions
from service.engine.rows.shapes import RowShape, RowSize
from service.engine.threads import in_pool
from service.schemas.regions import KINDS, GivenRegions

_MAX_SAMPLES = 2**31
"""Maximum map values that the regions of a request may sample: other requests wait while they are pooled."""

_MAX_MASK_PIXELS = 2**29
"""Maximum pixels of all masks of a request: each mask is read once for every map size of the extractor."""

_IMAGES_AT_ONCE = 64
"""Number of images whose boxes or points are mapped at a time."""

_MASKS_AT_ONCE, _MASK_PIXELS_AT_ONCE = 64, 2**23
"""Maximum masks, and their pixels unless a single one has more, that are mapped at a time."""


class PlannedRegions:
    """The regions of a request before they are placed on the feature maps.

    Args:
        plan: the images.
        given: their regions.
        outputs: the extractor's outputs.
        roi_size: positions per side of each pooled box.

    Attributes:
        counts: number of regions in images of each shape.

    Raises:
        BadBox, BadPoint, BadMask: there is not one list per image, or the masks have too many pixels in total.
    """

    def __init__(self, plan: Plan, given: GivenRegions, outputs: Sequence[OutputInfo], roi_size: int) -> None:
        kind, problem = KINDS[given.pool], PROBLEMS[given.pool]
        self._parts = plan.parts
        self._given = given
        self._outputs = outputs
        self._roi_size = roi_size
        self._placements = list(plan.placements())
        if len(given.of_images) != len(self._placements):
            raise problem(
                f"{kind.field} must have one list per image, {len(self._placements)} in all, not "
                f"{len(given.of_images)}: give an empty list for an image without {kind.field}"
            )
        if given.pool == "mask":
            pixels = sum(math.prod(p.image) * len(of) for p, of in zip(self._placements, given.of_images, strict=True))
            if pixels > _MAX_MASK_PIXELS:
                raise problem(
                    f"the masks have {pixels:,} pixels in all, and at most {_MAX_MASK_PIXELS:,} are allowed in one "
                    "request: send fewer at a time"
                )
        self._numbers = [len(regions) for regions in given.of_images]
        self.counts: Counter[RowShape] = Counter()
        for part, number in zip(plan.parts, self._numbers, strict=True):
            self.counts[part.shape] += number

    def weight_bytes(self, sizes: Mapping[RowShape, RowSize]) -> int:
        """Return the bytes of the weights that masks become; 0 for boxes and points.

        Raises:
            BadPoint, BadMask: pooling all of them would take too long.
        """
        masks = self._given.pool == "mask"

        def sampled(index: int, key: str, grid: MapGrid) -> int:
            return self._numbers[index] * (grid.height * grid.width if masks else 4)

        if self._given.pool != "roi":  # how large boxes are on a map is not known yet
            self._check_samples(sizes, sampled)
        positions = {shape: sum(g.height * g.width for g in _distinct(row.grids)) for shape, row in sizes.items()}
        weights = sum(count * positions[shape] for shape, count in self.counts.items())
        return torch.float32.itemsize * weights if masks else 0

    async def place(self, sizes: Mapping[RowShape, RowSize], intake: Executor) -> Regions:
        """Place the regions on the feature maps, in the threads of ``intake``.

        Raises:
            BadBox, BadPoint, BadMask: one is invalid, ``index`` and ``box``, ``point`` or ``mask`` in ``extra``
                identify it; or pooling all boxes would take too long.
        """
        grids = [sizes[part.shape].grids for part in self._parts]
        placed: list[Mapping[str, Tensor]] = []
        # In steps, so that other requests are served in between.
        if self._given.pool == "mask":
            for index in range(len(grids)):
                placed.append(await self._weights(index, grids[index], intake))
        else:
            for start in range(0, len(grids), _IMAGES_AT_ONCE):
                placed += await in_pool(intake, self._carried, grids[start : start + _IMAGES_AT_ONCE], start)
        if self._given.pool == "roi":

            def sampled(index: int, key: str, grid: MapGrid) -> int:
                return grid.samples(placed[index][key], self._roi_size)

            await in_pool(intake, self._check_samples, sizes, sampled)
        return Regions(self._numbers, placed, grids)

    def _carried(self, grids: Sequence[Mapping[str, MapGrid]], first: int) -> list[Mapping[str, Tensor]]:
        """Map the boxes or points of some images, of which ``first`` is the first one's index, to the model's input."""
        carried: list[Mapping[str, Tensor]] = []
        for index, maps in enumerate(grids, first):
            placement, regions = self._placements[index], self._given.of_images[index]
            try:
                one = placement.carry(regions) if self._given.pool == "roi" else placement.carry_points(regions)
            except FxError as error:
                of_image(index, error)
                raise
            carried.append(dict.fromkeys(maps, one))
        return carried

    async def _weights(self, index: int, grids: Mapping[str, MapGrid], intake: Executor) -> Mapping[str, Tensor]:
        """Map the masks of an image to weights of the positions of each map."""
        placement, masks = self._placements[index], self._given.of_images[index]
        weights = {grid: torch.empty(len(masks), grid.height * grid.width) for grid in _distinct(grids)}

        step = max(1, min(_MASKS_AT_ONCE, _MASK_PIXELS_AT_ONCE // math.prod(placement.image)))

        def carry(start: int) -> None:
            some = slice(start, start + step)
            try:
                carried = placement.carry_masks(masks[some], list(weights), start)
            except FxError as error:
                of_image(index, error)
                raise
            for whole, part in zip(weights.values(), carried, strict=True):
                whole[some] = part

        for start in range(0, len(masks), step):
            await in_pool(intake, carry, start)
        return {key: weights[replace(grid, prefix=0)] for key, grid in grids.items()}

    def _check_samples(self, sizes: Mapping[RowShape, RowSize], sampled: Callable[[int, str, MapGrid], int]) -> None:
        """Check the number of map values that pooling reads.

        Args:
            sampled: returns the number of positions read for the regions of an image on the map of an output.
        """
        samples = 0
        for index, part in enumerate(self._parts):
            row = sizes[part.shape]
            for info in self._outputs:
                if (grid := row.grids.get(info.key)) is not None:
                    channels = pooled_regions_shape(row.outputs[info.key][0], info.layout, 1)[1]
                    samples += channels * sampled(index, info.key, grid)
        if samples > _MAX_SAMPLES:
            field = KINDS[self._given.pool].field
            raise PROBLEMS[self._given.pool](
                f"pooling these {field} needs {samples:,} values of the maps, and at most {_MAX_SAMPLES:,} are allowed "
                f"in one request: send fewer or smaller {field}, or ask for a coarser level"
            )


def _distinct(grids: Mapping[str, MapGrid]) -> set[MapGrid]:
    """Return the distinct grids of maps, whatever tokens precede them."""
    return {replace(grid, prefix=0) for grid in grids.values()}
