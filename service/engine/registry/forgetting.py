"""Which extractors that are not in memory are known no longer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from service.engine.record import ExtractorRecord

REMEMBERED_RECORDS = 1024
"""Most extractors that are remembered without being in memory: failed ones, and evicted ones without a name."""

REMEMBERED_BYTES = 64 * 1024**2
"""Most bytes of what is known of extractors that are not in memory, those with a name included."""


def forgettable(records: Iterable[ExtractorRecord], names_bytes: Callable[[str], int]) -> list[ExtractorRecord]:
    """What to forget before one more is made, so that specs cannot take the memory one by one.

    What was used least recently goes first, and what has a name, by which it is addressed, last.

    Args:
        records: all that there are.
        names_bytes: the bytes that the names of an id take.
    """
    empty = [record for record in records if record.run is None and not record.pinned_or_active]
    empty.sort(key=lambda record: (_has_name(record), record.last_used))
    sizes = [record.description_bytes + names_bytes(record.id) for record in empty]
    over = max(0, sum(not _has_name(record) for record in empty) - REMEMBERED_RECORDS + 1)
    held = sum(sizes)
    for place, size in enumerate(sizes):
        if place >= over and held <= REMEMBERED_BYTES:
            return empty[:place]
        held -= size
    return empty


def _has_name(record: ExtractorRecord) -> bool:
    return record.name is not None and record.state != "failed"
