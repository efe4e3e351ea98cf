"""The extractors known to this process, by id and by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, ValuesView

from prometheus_client import Counter

from service.engine.extractors.names import Names
from service.engine.record import ExtractorRecord
from service.problems import UnknownExtractor

REMEMBERED_RECORDS = 1024
"""Maximum records of extractors that failed, or were evicted and have no name."""

REMEMBERED_BYTES = 64 * 1024**2
"""Maximum bytes of the records of extractors that are not in memory, including those with a name."""


class Records:
    """Loaded and evicted extractors, in the order they were added. For one event loop.

    Args:
        evictions: counts the records that are forgotten to make room for others.
    """

    def __init__(self, evictions: Counter) -> None:
        self._evictions = evictions
        self._by_id: dict[str, ExtractorRecord] = {}
        self._names = Names()

    def get(self, id: str) -> ExtractorRecord | None:
        """Return the extractor with that id, if there is one."""
        return self._by_id.get(id)

    def known(self, id_or_name: str) -> ExtractorRecord | None:
        """Return the extractor with that id or name, if there is one."""
        return self._by_id.get(id_or_name) or self._by_id.get(self._names.id(id_or_name) or "")

    def find(self, id_or_name: str) -> ExtractorRecord:
        """Return the extractor with that id or name.

        Raises:
            UnknownExtractor: it does not exist. Searching for suggestions takes longer than a hit.
        """
        record = self.known(id_or_name)
        if record is None:
            suggestions = self._names.near(id_or_name, reversed(self._by_id))
            hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; POST /v1/extractors creates one"
            raise UnknownExtractor(f"there is no extractor {id_or_name!r}{hint}", suggestions=suggestions)
        return record

    def list(self) -> list[ExtractorRecord]:
        """Return all extractors, in the order they were added."""
        return list(self._by_id.values())

    def values(self) -> ValuesView[ExtractorRecord]:
        """Return a live view of all extractors."""
        return self._by_id.values()

    def add(self, record: ExtractorRecord) -> None:
        """Add ``record``, forgetting unused records that exceed the limits."""
        for unused in _forgettable(self._by_id.values(), self._names.bytes):
            self.remove(unused)
            self._evictions.labels("record", "unused").inc()
        self._by_id[record.id] = record

    def remove(self, record: ExtractorRecord) -> None:
        """Forget ``record`` and its names."""
        del self._by_id[record.id]
        self._names.forget(record.id)

    def name(self, record: ExtractorRecord, name: str) -> None:
        """Give ``name`` to ``record``, taking it from any other."""
        before = self.known(name)
        self._names.give(name, record.id)
        record.name = name
        if before is not None and before is not record:
            before.name = self._names.last(before.id)

    def free_name(self, name: str) -> None:
        """Free ``name``."""
        record = self.known(name)
        self._names.free(name)
        if record is not None:
            record.name = self._names.last(record.id)

    def free_names(self, record: ExtractorRecord) -> None:
        """Free all names of ``record``."""
        self._names.forget(record.id)
        record.name = None


def _forgettable(records: Iterable[ExtractorRecord], names_bytes: Callable[[str], int]) -> list[ExtractorRecord]:
    """Return the records to forget before another is added, so that records cannot fill the memory.

    The least recently used go first; those with a name, by which clients address them, last.

    Args:
        records: all records.
        names_bytes: returns the bytes of the names of an id.
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
