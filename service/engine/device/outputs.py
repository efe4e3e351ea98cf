"""The outputs of a batch, split among its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxcore.graph.tokens.prefix_tokens import PrefixTokens
from fxcore.pooling import MapGrid
from service.engine.device.job import Item, Job
from service.engine.options import FeatureOptions


class OutputRows(NamedTuple):
    """One output of a batch.

    Attributes:
        key: of the output.
        layout: of one row; see :func:`service.engine.rows.shapes.row_layout`.
        prefix: of tokens, those that stand for no position.
        values: ``[rows, ...]``, on the device.
    """

    key: str
    layout: str | None
    prefix: PrefixTokens
    values: Tensor


class Finished(NamedTuple):
    """What a batch gives the items with equal options.

    Attributes:
        items: those items, in order.
        outputs: by key, ``[rows, ...]`` of these items, on the CPU.
        borrowed: keys of outputs in memory that the next batch overwrites.
        overflows: of the outputs with values that the dtype asked for cannot hold, which rows have them, bool
            ``[rows]``.
    """

    items: Sequence[Item]
    outputs: dict[str, Tensor]
    borrowed: frozenset[str]
    overflows: dict[str, Tensor]


def by_options(items: Sequence[Item]) -> list[tuple[FeatureOptions, list[Item], list[int] | None]]:
    """Items grouped by their options, with the batch rows of each group (None: all, in order)."""
    groups: dict[FeatureOptions, tuple[list[Item], list[int]]] = {}
    start = 0
    for item in items:
        group, rows = groups.setdefault(item.job.options, ([], []))
        group.append(item)
        rows.extend(range(start, start + len(item.rows)))
        start += len(item.rows)
    return [(options, group, rows if len(groups) > 1 else None) for options, (group, rows) in groups.items()]


def deliveries(items: Sequence[Item]) -> list[tuple[Job, range]]:
    """Return the deliveries to jobs, in the order of ``items``; consecutive items of one job are one delivery."""
    deliveries: list[tuple[Job, range]] = []
    for item in items:
        job, rows = deliveries[-1] if deliveries else (None, range(0))
        if item.job is job and rows.stop == item.rows.start:
            deliveries[-1] = item.job, range(rows.start, item.rows.stop)
        else:
            deliveries.append((item.job, item.rows))
    return deliveries


def finish(
    outputs: Sequence[OutputRows], options: FeatureOptions, items: Sequence[Item], rows: list[int] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a batch's outputs with ``options`` applied, by key, on the device; and their overflows, as in
    :class:`Finished`.

    Args:
        outputs: of the whole batch.
        options: of ``items``.
        items: those of the batch with these options.
        rows: their rows in the batch; None for all, in order.
    """
    finished, overflows = {}, {}
    matrices = items[0].job.matrices
    for key, layout, prefix, values in outputs:
        if options.wants(key):
            chosen = values if rows is None else values[rows]
            made, over = options.finish(chosen, layout, prefix, *_regions_of(items, key), matrices)
            finished[key] = made
            if over is not None:
                overflows[key] = over
    return finished, overflows


def split_rows(values: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """``values`` split into pieces of ``counts`` rows."""
    return torch.split(values, counts) if len(counts) > 1 else (values,)


def _regions_of(items: Sequence[Item], key: str) -> tuple[Sequence[Tensor], MapGrid | None]:
    """Return the regions of each row of ``items``, which have one input shape, on the output ``key``, and its grid."""
    first = items[0].job.regions
    if first is None:
        return (), None
    placed = [regions.placed[row][key] for item in items if (regions := item.job.regions) for row in item.rows]
    return placed, first.grids[items[0].rows.start][key]
