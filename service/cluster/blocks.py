"""Blocks of pending images: the tables that the driver of a run on Ray sends to its actors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import orjson
import pyarrow

from service.offline.inputs.sources import Source
from service.offline.outputs.index import Index


def blocks_of(index: Index, lost: Mapping[str, str], rows: int) -> Iterator[pyarrow.Table]:
    """Yield tables of the locations of pending images.

    A table has at most ``rows`` rows of features, unless a single image has more. Images in ``lost`` also have the
    reason.
    """
    some: list[Source] = []
    count = 0
    for source in itertools.chain.from_iterable(index.pending()):
        if some and count + source.rows > rows:
            yield _block(some, lost)
            some, count = [], 0
        some.append(source)
        count += source.rows
    if some:
        yield _block(some, lost)


def _block(some: Sequence[Source], lost: Mapping[str, str]) -> pyarrow.Table:
    regions = [None if source.regions is None else orjson.dumps(source.regions) for source in some]
    return pyarrow.table(
        {
            "path": pyarrow.array([source.path for source in some], pyarrow.large_string()),
            "file": pyarrow.array([source.file.encode("utf-8", "surrogateescape") for source in some]),
            "offset": pyarrow.array([source.offset for source in some], pyarrow.int64()),
            "size": pyarrow.array([source.size for source in some], pyarrow.int64()),
            "regions": pyarrow.array(regions, pyarrow.large_binary()),
            "error": pyarrow.array([lost.get(source.path) for source in some], pyarrow.string()),
        }
    )


def sources_of(block: pyarrow.Table) -> tuple[list[Source], list[tuple[str, str]]]:
    """Return the images of a block, and (path, reason) of those that cannot be read."""
    found, lost = [], []
    for row in block.to_pylist():
        if row["error"] is not None:
            lost.append((row["path"], row["error"]))
        else:
            file = row["file"].decode("utf-8", "surrogateescape")
            regions = None if row["regions"] is None else orjson.loads(row["regions"])
            found.append(Source(row["path"], file, row["offset"], row["size"], regions=regions))
    return found, lost
