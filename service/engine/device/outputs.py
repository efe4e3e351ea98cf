"""Splitting the outputs of a batch among its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxcore.extractor import OutputInfo
from fxcore.pooling import MapGrid
from service.engine.device.job import Item, Job
from service.engine.options import FeatureOptions
from service.engine.rows.shapes import row_layout


class Finished(NamedTuple):
    """The outputs of a batch for the items with equal options.

    Attributes:
        items: those items, in order.
        outputs: key → ``[rows, ...]`` of these items, on the CPU.
        borrowed: keys of outputs in memory that the next batch overwrites.
        overflows: key → bool mask ``[rows]`` of the rows with values that overflow the requested dtype, for outputs
            that have such rows.
    """

    items: Sequence[Item]
    outputs: dict[str, Tensor]
    borrowed: frozenset[str]
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
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Apply ``options`` to a batch's outputs.

    Return them and their overflows by key, on the device; see :class:`Finished`.

    Args:
        outputs: outputs of the whole batch, ``[rows, ...]`` on the device, with one row per image.
        options: options of ``items``.
        items: the items of the batch with these options.
        rows: their rows in the batch; None for all, in order.
    """
    finished, overflows = {}, {}
    matrices = items[0].job.matrices
    for info, values in outputs:
        if options.wants(info.key):
            chosen = values if rows is None else values[rows]
            layout = row_layout(info.layout, info.rows_per_image)
            made, over = options.finish(chosen, layout, info.prefix, *_regions_of(items, info.key), matrices)
            finished[info.key] = made
            if over is not None:
                overflows[info.key] = over
    return finished, overflows


def split_rows(values: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """Split ``values`` into pieces of ``counts`` rows."""
    return torch.split(values, counts) if len(counts) > 1 else (values,)


def _regions_of(items: Sequence[Item], key: str) -> tuple[Sequence[Tensor], MapGrid | None]:
    """Return the regions of each row of ``items`` on the output ``key``, and the grid of that output.

    All items have the same input shape.
    """
    first = items[0].job.regions
    if first is None:
        return (), None
    placed = [regions.placed[row][key] for item in items if (regions := item.job.regions) for row in item.rows]
    return placed, first.grids[items[0].rows.start][key]
