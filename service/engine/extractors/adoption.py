"""Extractors that other processes made: read from the store when this process is first asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fxcore.errors import FxError
from service.engine.extractors.records import Records
from service.engine.extractors.sharing import Sharing
from service.engine.extractors.store import Stored
from service.engine.record import ExtractorRecord
from service.engine.tasks import background
from service.problems import NotReady, Problem
from service.schemas.v1 import ExtractorSpec


class Adoption:
    """Looks for extractors in the store and makes them known. For one event loop.

    Args:
        sharing: reads the store.
        records: the extractors known here.
        resolve: makes a record of a spec.
        ensure: starts to build an extractor that is not in memory.
    """

    def __init__(
        self,
        sharing: Sharing,
        records: Records,
        resolve: Callable[[ExtractorSpec], Awaitable[ExtractorRecord]],
        ensure: Callable[[ExtractorRecord], None],
    ) -> None:
        self._sharing = sharing
        self._records = records
        self._resolve = resolve
        self._ensure = ensure
        self._running: dict[str, asyncio.Task[ExtractorRecord]] = {}

    async def look_up(self, id_or_name: str, miss_seconds: float = 0.0) -> ExtractorRecord | None:
        """Return the extractor of that id or name in the store, whose build is started here, or None.

        Args:
            id_or_name: what to look for.
            miss_seconds: how old a search that found none may be to be relied on.

        Raises:
            NotReady: there may be one, and the store cannot be read.
        """
        stored = await self._sharing.find(id_or_name, miss_seconds)
        if stored is None:
            return None
        record = await self._adopt(stored)
        # Of an extractor that was deleted and made again meanwhile, the name may be another's.
        if id_or_name != record.id and record.token == stored.token:
            self._records.name(record, id_or_name)
        return record

    async def _adopt(self, stored: Stored) -> ExtractorRecord:
        """Return the record of ``stored``; concurrent callers share one."""
        running = self._running.get(stored.id)
        if running is None:
            running = self._running[stored.id] = background(self._known(stored))
            running.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(running)

    async def _known(self, stored: Stored) -> ExtractorRecord:
        try:
            record = self._records.get(stored.id) or await self._made_known(stored)
            self._ensure(record)
            return record
        finally:
            del self._running[stored.id]

    async def _made_known(self, stored: Stored) -> ExtractorRecord:
        try:
            fresh = await self._resolve(stored.spec)
        except (FxError, Problem) as problem:
            raise NotReady(f"extractor {stored.id}, which is in the store: {problem.detail}") from None
        if fresh.id != stored.id:
            raise NotReady(
                f"extractor {stored.id} was made where {stored.spec.model} is another graph, by another "
                "version of torchvision perhaps; make it anew here"
            )
        owner = None if fresh.name is None else await self._sharing.owner(fresh.name)
        now = await self._sharing.get(stored.id)
        if now is None:  # deleted meanwhile
            return self._records.find(stored.id)
        record = self._records.get(stored.id)
        if record is not None:
            return record
        name, fresh.name, fresh.token, fresh.adopted = fresh.name, None, now.token, True
        self._records.add(fresh)
        if name is not None and owner is not None and (owner.id, owner.token) == (stored.id, now.token):
            self._records.name(fresh, name)
        return fresh
