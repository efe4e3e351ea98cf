"""Statistics of blocks of images as one-row tables, which actors send to the driver to be merged."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow

from service.offline.statistics.reducer import Reduction
from service.offline.statistics.statistics import Statistics


def reduced_table(statistics: Statistics, paths: Sequence[str], errors: Sequence[tuple[str, str]]) -> pyarrow.Table:
    """Return a table of ``statistics``, the paths of their images, and the (path, reason) of other images."""
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
    """Merge the rows of a table from :func:`reduced_table` into ``reduction``."""
    for row in table.to_pylist():
        statistics = Statistics.from_states(dict(zip(row["outputs"], row["states"], strict=True)))
        reduction.merge(row["paths"], statistics, list(zip(row["lost"], row["reasons"], strict=True)))
