"""The extractors that this process knows, by id and by name."""

from __future__ import annotations

from collections.abc import ValuesView

from prometheus_client import Counter

from service.engine.errors import UnknownExtractor
from service.engine.record import ExtractorRecord
from service.engine.registry.forgetting import forgettable
from service.engine.registry.names import Names


class Records:
    """Extractors in memory and evicted ones, in the order they came to be known. For one event loop.

    Args:
        evictions: counts the extractors that are forgotten to make place for others.
    """

    def __init__(self, evictions: Counter) -> None:
        self._evictions = evictions
        self._by_id: dict[str, ExtractorRecord] = {}
        self._names = Names()

    def get(self, id: str) -> ExtractorRecord | None:
        """The extractor of that id, if there is one."""
        return self._by_id.get(id)

    def known(self, id_or_name: str) -> ExtractorRecord | None:
        """The extractor of that id or name, if there is one."""
        return self._by_id.get(id_or_name) or self._by_id.get(self._names.id(id_or_name) or "")

    def find(self, id_or_name: str) -> ExtractorRecord:
        """The extractor of that id or name.

        Raises:
            UnknownExtractor: there is none. What was meant is looked for, which takes longer than finding one does.
        """
        record = self.known(id_or_name)
        if record is None:
            suggestions = self._names.near(id_or_name, reversed(self._by_id))
            hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; POST /v1/extractors makes one"
            raise UnknownExtractor(f"there is no extractor {id_or_name!r}{hint}", suggestions=suggestions)
        return record

    def list(self) -> list[ExtractorRecord]:
        """All extractors, in the order they came to be known."""
        return list(self._by_id.values())

    def values(self) -> ValuesView[ExtractorRecord]:
        """All extractors, also those that come to be known later."""
        return self._by_id.values()

    def add(self, record: ExtractorRecord) -> None:
        """Make ``record`` known; unused ones that are too many beside it are forgotten."""
        for unused in forgettable(self._by_id.values(), self._names.bytes):
            self.remove(unused)
            self._evictions.labels("record", "unused").inc()
        self._by_id[record.id] = record

    def replace(self, record: ExtractorRecord) -> None:
        """Have ``record`` in the place of the one of the same id."""
        self._by_id[record.id] = record

    def remove(self, record: ExtractorRecord) -> None:
        """Forget ``record`` and its names."""
        del self._by_id[record.id]
        self._names.forget(record.id)

    def name(self, record: ExtractorRecord, name: str) -> None:
        """Give ``name`` to ``record``, whichever had it before."""
        before = self.known(name)
        self._names.give(name, record.id)
        record.name = name
        if before is not None and before is not record:
            before.name = self._names.last(before.id)

    def free_name(self, name: str) -> None:
        """Take ``name`` from whichever has it."""
        self._names.free(name)

    def free_names(self, record: ExtractorRecord) -> None:
        """Take all its names from ``record``."""
        self._names.forget(record.id)
