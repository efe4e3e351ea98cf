"""The extractors that this process knows, by id and by name."""

from __future__ import annotations

from collections.abc import ValuesView

from prometheus_client import Counter

from service.engine.extractors.forgetting import forgettable
from service.engine.extractors.names import Names
from service.engine.record import ExtractorRecord
from service.problems import UnknownExtractor


class Records:
    """Extractors in memory and evicted ones, in the order they were added. For one event loop.

    Args:
        evictions: counts the extractors that are forgotten to make room for others.
    """

    def __init__(self, evictions: Counter) -> None:
        self._evictions = evictions
        self._by_id: dict[str, ExtractorRecord] = {}
        self._names = Names()

    def get(self, id: str) -> ExtractorRecord | None:
        """Return the extractor of that id, if there is one."""
        return self._by_id.get(id)

    def known(self, id_or_name: str) -> ExtractorRecord | None:
        """Return the extractor of that id or name, if there is one."""
        return self._by_id.get(id_or_name) or self._by_id.get(self._names.id(id_or_name) or "")

    def find(self, id_or_name: str) -> ExtractorRecord:
        """Return the extractor of that id or name.

        Raises:
            UnknownExtractor: there is none; looking for suggestions takes longer than finding one.
        """
        record = self.known(id_or_name)
        if record is None:
            suggestions = self._names.near(id_or_name, reversed(self._by_id))
            hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; POST /v1/extractors makes one"
            raise UnknownExtractor(f"there is no extractor {id_or_name!r}{hint}", suggestions=suggestions)
        return record

    def list(self) -> list[ExtractorRecord]:
        """Return all extractors, in the order they were added."""
        return list(self._by_id.values())

    def values(self) -> ValuesView[ExtractorRecord]:
        """Return a view of all extractors, those added later included."""
        return self._by_id.values()

    def add(self, record: ExtractorRecord) -> None:
        """Add ``record``; of the unused ones, those over the limits are forgotten."""
        for unused in forgettable(self._by_id.values(), self._names.bytes):
            self.remove(unused)
            self._evictions.labels("record", "unused").inc()
        self._by_id[record.id] = record

    def replace(self, record: ExtractorRecord) -> None:
        """Replace the record of the same id by ``record``."""
        self._by_id[record.id] = record

    def remove(self, record: ExtractorRecord) -> None:
        """Forget ``record`` and its names."""
        del self._by_id[record.id]
        self._names.forget(record.id)

    def name(self, record: ExtractorRecord, name: str) -> None:
        """Give ``name`` to ``record``, and take it from another that has it."""
        before = self.known(name)
        self._names.give(name, record.id)
        record.name = name
        if before is not None and before is not record:
            before.name = self._names.last(before.id)

    def free_name(self, name: str) -> None:
        """Free ``name``."""
        self._names.free(name)

    def free_names(self, record: ExtractorRecord) -> None:
        """Free all names of ``record``."""
        self._names.forget(record.id)
