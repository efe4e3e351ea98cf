"""Splitting the outputs of a batch among its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fxcore.extractor import OutputInfo
from service.engine.device.job import Item, Job
from service.engine.options import FeatureOptions
from service.engine.rows.shapes import row_layout


class Finished(NamedTuple):
    """The outputs of a batch for the items with equal options.

    Attributes:
        items: those items, in order.
        outputs: key → ``[rows, ...]`` of these items, on the device until the worker copies them to the CPU.
        overflows: key → bool mask ``[rows]`` of the rows with values that overflow the requested dtype, for outputs
            that have such rows.
    """

    items: Sequence[Item]
    outputs: dict[str, Tensor]
    overflows: dict[str, Tensor]


def by_options(items: Sequence[Item]) -> list[tuple[FeatureOptions, list[Item], list[int] | None]]:
    """Group items by their options, with the batch rows of each group (None: all, in order)."""
    groups: dict[FeatureOptions, tuple[list[Item], list[int]]] = {}
    start = 0
    for item in items:
        group, rows = groups.setdefault(item.job.options, ([], []))
        group.append(item)
        rows.extend(range(start, start + len(item.rows)))
        start += len(item.rows)
    return [(options, group, rows if len(groups) > 1 else None) for options, (group, rows) in groups.items()]


def deliveries(items: Sequence[Item]) -> list[tuple[Job, range]]:
    """Return the deliveries to jobs, in the order of ``items``.

    Consecutive items of one job are merged into one delivery.
    """
    deliveries: list[tuple[Job, range]] = []
    for item in items:
        job, rows = deliveries[-1] if deliveries else (None, range(0))
        if item.job is job and rows.stop == item.rows.start:
            deliveries[-1] = item.job, range(rows.start, item.rows.stop)
        else:
            deliveries.append((item.job, item.rows))
    return deliveries


def finish(
    outputs: Sequence[tuple[OutputInfo, Tensor]],
    options: FeatureOptions,
    items: Sequence[Item],
    rows: list[int] | None,
) -> Finished:
    """Apply ``options`` to a batch's outputs, on the device.

    Args:
        outputs: outputs of the whole batch, ``[rows, ...]`` on the device, with one row per image.
        options: options of ``items``.
        items: the items of the batch with these options.
        rows: their rows in the batch; None for all, in order.
    """
    finished = Finished(items, {}, {})
    first = items[0].job
    for info, values in outputs:
        if options.wants(info.key):
            chosen = values if rows is None else values[rows]
            layout = row_layout(info.layout, info.rows_per_image)
            regions: Sequence[Tensor] = ()
            grid = None
            if first.regions is not None:  # then the others have regions too, and their rows are of the same shape
                placed = [item.job.regions.placed[row] for item in items if item.job.regions for row in item.rows]
                regions = [of_image[info.key] for of_image in placed]
                grid = first.regions.grids[items[0].rows.start][info.key]
            made, over = options.finish(chosen, layout, info.prefix, regions, grid, first.matrices)
            finished.outputs[info.key] = made
            if over is not None:
                finished.overflows[info.key] = over
    return finished
