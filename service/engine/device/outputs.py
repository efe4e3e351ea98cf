"""Which rows of a batch's outputs go to whom."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcore.pooling import MapGrid
from service.engine.device.job import Item, Job
from service.engine.options import FeatureOptions


def by_options(items: Sequence[Item]) -> list[tuple[FeatureOptions, list[Item], list[int] | None]]:
    """Items that want the same done with their outputs, with the batch rows they take (None: all, in order)."""
    groups: dict[FeatureOptions, tuple[list[Item], list[int]]] = {}
    start = 0
    for item in items:
        group, rows = groups.setdefault(item.job.options, ([], []))
        group.append(item)
        rows.extend(range(start, start + len(item.rows)))
        start += len(item.rows)
    return [(options, group, rows if len(groups) > 1 else None) for options, (group, rows) in groups.items()]


def deliveries(items: Sequence[Item]) -> list[tuple[Job, range]]:
    """What goes to whom, in the order of ``items``; those of a job that follow one another are one delivery."""
    deliveries: list[tuple[Job, range]] = []
    for item in items:
        job, rows = deliveries[-1] if deliveries else (None, range(0))
        if item.job is job and rows.stop == item.rows.start:
            deliveries[-1] = item.job, range(rows.start, item.rows.stop)
        else:
            deliveries.append((item.job, item.rows))
    return deliveries


def regions_of(items: Sequence[Item], key: str) -> tuple[Sequence[Tensor], MapGrid | None]:
    """What :meth:`~service.engine.options.FeatureOptions.finish` pools of the output ``key`` of ``items``, which have
    one input shape: the boxes of each row, and the places of the map."""
    boxes = [regions.boxes[row] for item in items if (regions := item.job.regions) for row in item.rows]
    first = items[0].job.regions
    return boxes, None if first is None else first.grids[items[0].rows.start][key]


def select_rows(values: Tensor, rows: list[int] | None) -> Tensor:
    return values if rows is None else values[rows]


def split_rows(values: Tensor, counts: list[int]) -> Sequence[Tensor]:
    return torch.split(values, counts) if len(counts) > 1 else (values,)


def on_cpu(values: Tensor) -> Tensor:
    """``values.cpu()``, not called where there is nothing to do, because it releases the GIL even then.

    Values are made contiguous on their device, which is many times faster there than on the CPU.
    """
    return values.contiguous().cpu() if values.device.type != "cpu" else values
