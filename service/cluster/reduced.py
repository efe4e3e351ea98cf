"""Blocks of images reduced to statistics, as tables of one row: what actors send to the driver, which merges them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow

from service.offline.statistics.reducer import Reduction
from service.offline.statistics.statistics import Statistics


def reduced_table(statistics: Statistics, paths: Sequence[str], errors: Sequence[tuple[str, str]]) -> pyarrow.Table:
    """Return a table of ``statistics``, the paths of the images in them, and (path, reason) of the others."""
    states = statistics.states()
    return pyarrow.table(
        {
            "outputs": pyarrow.array([list(states)], pyarrow.list_(pyarrow.string())),
            "states": pyarrow.array([list(states.values())], pyarrow.list_(pyarrow.large_binary())),
            "paths": pyarrow.array([list(paths)], pyarrow.list_(pyarrow.large_string())),
            "lost": pyarrow.array([[path for path, _ in errors]], pyarrow.list_(pyarrow.large_string())),
            "reasons": pyarrow.array([[reason for _, reason in errors]], pyarrow.list_(pyarrow.string())),
        }
    )


def merge_table(reduction: Reduction, table: pyarrow.Table) -> None:
    """Merge the rows of such tables into ``reduction``."""
    for row in table.to_pylist():
        statistics = Statistics.from_states(dict(zip(row["outputs"], row["states"], strict=True)))
        reduction.merge(row["paths"], statistics, list(zip(row["lost"], row["reasons"], strict=True)))
