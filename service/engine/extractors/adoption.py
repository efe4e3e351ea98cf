"""Extractors as the store has them: what other processes made is made known here, what they deleted is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fxcore.errors import FxError
from service.engine.extractors.records import Records
from service.engine.extractors.sharing import Sharing
from service.engine.extractors.store_health import CHECK_SECONDS
from service.engine.record import ExtractorRecord
from service.engine.tasks import background
from service.problems import NotReady, Problem
from service.schemas.specs import ExtractorSpec


class Adoption:
    """Keeps the extractors known here like those in the store, as they are used. For one event loop.

    Args:
        sharing: reads the store.
        records: the extractors known here.
        resolve: makes a record of a spec.
        ensure: starts to build an extractor that is not in memory.
        forget: forgets an extractor that was deleted.
    """

    def __init__(
        self,
        sharing: Sharing,
        records: Records,
        resolve: Callable[[ExtractorSpec], Awaitable[ExtractorRecord]],
        ensure: Callable[[ExtractorRecord], None],
        forget: Callable[[ExtractorRecord], None],
    ) -> None:
        self._sharing = sharing
        self._records = records
        self._resolve = resolve
        self._ensure = ensure
        self._forget = forget
        self._running: dict[str, asyncio.Task[ExtractorRecord]] = {}

    async def known(self, id_or_name: str, max_age: float | None = None) -> ExtractorRecord | None:
        """Return the extractor of that id or name that is known here, unless it was deleted or the name is another's.

        The store is read for it at most once in ``max_age`` seconds, by default :data:`CHECK_SECONDS`. What is in
        memory is relied on where the store cannot be read.
        """
        record = self._records.known(id_or_name)
        if record is None or not record.saved:
            return record
        max_age = CHECK_SECONDS if max_age is None else max_age
        try:
            if await self._sharing.find(id_or_name, max_age, record.id) == record.id:
                return record
            if await self._sharing.find(record.id, max_age, record.id) is None:
                if self._records.get(record.id) is record:
                    self._forget(record)
            elif self._records.known(id_or_name) is record:
                self._records.free_name(id_or_name)
            return None
        except NotReady:
            return record

    async def look_up(self, id_or_name: str, max_miss_age: float = 0.0) -> ExtractorRecord | None:
        """Return the extractor of that id or name, or None. If another process made it, its build is started here.

        Args:
            id_or_name: what to look for.
            max_miss_age: seconds for which an earlier search that found none is relied on.

        Raises:
            NotReady: there may be one, and the store cannot be read.
        """
        record = await self.known(id_or_name)
        if record is not None:
            return record
        id = await self._sharing.find(id_or_name, max_miss_age)
        if id is None:
            return None
        running = self._running.get(id)
        if running is None:
            running = self._running[id] = background(self._adopt(id), "adopt")
            running.add_done_callback(lambda task: task.cancelled() or task.exception())
        record = await asyncio.shield(running)
        if id_or_name != id and self._records.get(id) is record:
            self._records.name(record, id_or_name)
        return record

    async def _adopt(self, id: str) -> ExtractorRecord:
        try:
            record = self._records.get(id) or await self._made_known(id)
            self._ensure(record)
            return record
        finally:
            del self._running[id]

    async def _made_known(self, id: str) -> ExtractorRecord:
        stored = await self._sharing.get(id)
        if stored is None:  # deleted meanwhile
            return self._records.find(id)
        try:
            fresh = await self._resolve(stored.spec)
        except (FxError, Problem) as problem:
            raise NotReady(f"extractor {id}, which is in the store: {problem.detail}") from None
        if fresh.id != id:
            raise NotReady(
                f"extractor {id} was made where {stored.spec.model} is another graph, by another version of "
                "torchvision perhaps; make it anew here"
            )
        name = stored.spec.name
        owner = None if name is None else await self._sharing.find(name)
        record = self._records.get(id)
        if record is not None:
            return record
        fresh.saved = fresh.adopted = True
        self._records.add(fresh)
        if name is not None and owner == id:
            self._records.name(fresh, name)
        return fresh
