"""The extractors known to this process, by id and by name."""

from __future__ import annotations

from collections.abc import Iterable, ValuesView
from difflib import get_close_matches
from itertools import chain, islice

from prometheus_client import Counter

from service.engine.record import ExtractorRecord
from service.problems import UnknownExtractor

MAX_NAMES = 32
"""Maximum names per extractor, so that renaming it repeatedly does not use up memory. The oldest are freed."""

COMPARED = 256
"""Maximum names and ids that an unknown one is compared with; this takes milliseconds of event loop time."""

_SIMILAR = 0.6
"""Minimum similarity of a suggestion; random ids rarely have it."""

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
        self._by_name: dict[str, ExtractorRecord] = {}  # in the order the names were given

    def get(self, id: str) -> ExtractorRecord | None:
        """Return the extractor with that id, if there is one."""
        return self._by_id.get(id)

    def known(self, id_or_name: str) -> ExtractorRecord | None:
        """Return the extractor with that id or name, if there is one."""
        return self._by_id.get(id_or_name) or self._by_name.get(id_or_name)

    def find(self, id_or_name: str) -> ExtractorRecord:
        """Return the extractor with that id or name.

        Raises:
            UnknownExtractor: it does not exist. Searching for suggestions takes longer than a hit.
        """
        record = self.known(id_or_name)
        if record is None:
            newest = islice(chain(reversed(self._by_name), reversed(self._by_id)), COMPARED)
            suggestions = get_close_matches(id_or_name[:128], newest, cutoff=_SIMILAR)
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
        for unused in _forgettable(self._by_id.values()):
            self.forget(unused)
            self._evictions.labels("record", "unused").inc()
        self._by_id[record.id] = record

    def forget(self, record: ExtractorRecord) -> None:
        """Forget ``record`` and its names."""
        del self._by_id[record.id]
        self.free_names(record)

    def name(self, record: ExtractorRecord, name: str) -> None:
        """Give ``name`` to ``record``, taking it from any other."""
        self.free_name(name)
        self._by_name[name] = record
        record.names.append(name)
        if len(record.names) > MAX_NAMES:
            self.free_name(record.names[0])

    def free_name(self, name: str) -> None:
        """Free ``name``."""
        record = self._by_name.pop(name, None)
        if record is not None:
            record.names.remove(name)

    def free_names(self, record: ExtractorRecord) -> None:
        """Free all names of ``record``."""
        for name in record.names:
            del self._by_name[name]
        record.names.clear()


def _forgettable(records: Iterable[ExtractorRecord]) -> list[ExtractorRecord]:
    """Return the records to forget before another is added, so that records cannot fill the memory.

    The least recently used go first; those with a name, by which clients address them, last.
    """
    empty = [record for record in records if record.runtime is None and not record.pinned_or_active]
    empty.sort(key=lambda record: (_has_name(record), record.last_used))
    sizes = [record.bytes for record in empty]
    over = max(0, sum(not _has_name(record) for record in empty) - REMEMBERED_RECORDS + 1)
    held = sum(sizes)
    for place, size in enumerate(sizes):
        if place >= over and held <= REMEMBERED_BYTES:
            return empty[:place]
        held -= size
    return empty


def _has_name(record: ExtractorRecord) -> bool:
    return record.name is not None and record.state != "failed"
