"""Which evicted extractors to forget."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from service.engine.record import ExtractorRecord

REMEMBERED_RECORDS = 1024
"""Maximum records of extractors that failed, or were evicted and have no name."""

REMEMBERED_BYTES = 64 * 1024**2
"""Maximum bytes of the records of extractors that are not in memory, those with a name included."""


def forgettable(records: Iterable[ExtractorRecord], names_bytes: Callable[[str], int]) -> list[ExtractorRecord]:
    """Return the records to forget before another is added, so that records cannot fill the memory.

    The least recently used go first; those with a name, by which clients address them, last.

    Args:
        records: all records.
        names_bytes: the bytes that the names of an id take.
    """
    empty = [record for record in records if record.runtime is None and not record.pinned_or_active]
    empty.sort(key=lambda record: (_has_name(record), record.last_used))
    sizes = [record.bytes + names_bytes(record.id) for record in empty]
    over = max(0, sum(not _has_name(record) for record in empty) - REMEMBERED_RECORDS + 1)
    held = sum(sizes)
    for place, size in enumerate(sizes):
        if place >= over and held <= REMEMBERED_BYTES:
            return empty[:place]
        held -= size
    return empty


def _has_name(record: ExtractorRecord) -> bool:
    return record.name is not None and record.state != "failed"
