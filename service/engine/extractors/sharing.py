"""Reads and writes of the shared store that requests wait for, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from service.engine.device.threads import Pool, in_pool, run_at_low_priority
from service.engine.extractors.objects import DamagedObject, StoreError
from service.engine.extractors.store import Store, Stored
from service.engine.extractors.store_health import StoreHealth
from service.engine.record import ExtractorRecord
from service.engine.tasks import background
from service.problems import NotReady, StoreFull

log = logging.getLogger("fxserve.store")

NAMES_PER_EXTRACTOR = 4
"""How many times as many names as extractors the store may have, names of deleted extractors included for a day."""

_MAX_MISSES = 4096
_THREADS = 4


class _Search:
    """A look-up that several requests wait for."""

    def __init__(self, task: asyncio.Task[Stored | None]) -> None:
        self.began = time.monotonic()
        self.task = task
        # All who wait may have left: asyncio logs an exception that nobody reads.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


class Sharing:
    """Finds, saves, names and deletes extractors in a store, in its own threads. For one event loop.

    Args:
        store: what is shared.
        health: whether it can be used; failed writes and damaged objects are noted there.
        limit: maximum extractors in the store, about: processes that save at the same time may exceed it.

    Attributes:
        stored: how many extractors the store has, by the last sweep and what this process saved and deleted since.
        named: how many names it has, by the last sweep and what this process gave since.
    """

    def __init__(self, store: Store, health: StoreHealth, limit: int) -> None:
        self.stored = self.named = 0
        self._limit = limit
        self._most_names = NAMES_PER_EXTRACTOR * limit
        self._store = store
        self._health = health
        self._pool = Pool(_THREADS, "fxserve-store")
        self._listings = Pool(1, "fxserve-store-list", run_at_low_priority)
        self._listing = asyncio.Lock()
        self._saves: dict[str, set[asyncio.Task[tuple[Stored, bool]]]] = {}
        self._saving: Counter[str] = Counter()
        self._deleting: Counter[str] = Counter()
        self._missing: dict[str, float] = {}
        self._searches: dict[str, _Search] = {}

    def start(self) -> None:
        """Start the threads."""
        self._pool.start()
        self._listings.start()

    def close(self) -> None:
        """Begin nothing more."""
        for pool in (self._pool, self._listings):
            pool.shutdown(wait=False, cancel_futures=True)

    async def find(self, id_or_name: str, miss_seconds: float = 0.0) -> Stored | None:
        """Return the extractor of that id or name. Concurrent callers share one search.

        An extractor that exists when this is called is found: a search that began earlier and found none is repeated.

        Args:
            id_or_name: what to look for.
            miss_seconds: how old a search that found none may be to be relied on.

        Raises:
            NotReady: the store, or that extractor in it, cannot be read.
        """
        asked = time.monotonic()
        if asked - self._missing.get(id_or_name, -miss_seconds) < miss_seconds:
            return None
        while True:
            search = self._searches.get(id_or_name)
            if search is None:
                search = self._searches[id_or_name] = _Search(background(self._find(id_or_name)))
            found = await asyncio.shield(search.task)
            if found is not None or search.began >= asked:
                return found

    async def get(self, id: str) -> Stored | None:
        """Return the extractor ``id``.

        Raises:
            NotReady: see :meth:`find`.
        """
        async with self._operation("read", id):
            return await in_pool(self._pool, self._store.get, id)

    async def owner(self, name: str) -> Stored | None:
        """Return the extractor that has ``name``.

        Raises:
            NotReady: see :meth:`find`.
        """
        async with self._operation("read", name):
            return await in_pool(self._pool, self._store.owner, name)

    async def put(self, record: ExtractorRecord, asked_for: bool = False) -> tuple[Stored, bool]:
        """Save ``record`` unless the store has it; what the store has then, and whether that is new.

        Args:
            record: the extractor.
            asked_for: whether a client asked for it to be kept. What one-step requests make on their way is saved until
                the store is half full only, so that those cannot fill it.

        Raises:
            NotReady: the store cannot be written.
            StoreFull: it has as many extractors as it may.
        """
        id = record.id
        if self.stored >= (self._limit if asked_for else self._limit // 2):
            stored = await self.get(id)
            if stored is None:
                raise StoreFull("extractors", self.stored, self._limit)
            return stored, False
        self._saving[id] += 1
        try:
            async with self._operation("write", id):
                stored, new = await self._save(record)
        finally:
            self._saving -= Counter((id,))  # which drops what is zero
        self.stored += new
        self._missing.pop(id, None)
        self._health.damaged.pop(id, None)
        return stored, new

    async def claim(self, name: str, stored: Stored, may_replace: Callable[[str], bool]) -> str:
        """Give ``name`` to ``stored``, unless another has it that may not be replaced; the id that has it then.

        Raises:
            NotReady: the store cannot be written.
            StoreFull: it has as many names as it may.
        """
        if self.named >= self._most_names and await self.owner(name) is None:
            self.refuse_more_names()
        async with self._operation("write", name):
            owner = await in_pool(self._pool, self._store.claim, name, stored, may_replace)
        self._missing.pop(name, None)
        self.named += 1  # or it was known: a sweep will count
        return owner

    def refuse_more_names(self) -> None:
        """Check that the store has room for another name.

        Raises:
            StoreFull: it has not.
        """
        if self.named >= self._most_names:
            raise StoreFull("names", self.named, self._most_names)

    async def delete(self, id: str) -> bool:
        """Delete the extractor ``id`` in all processes; False if the store does not have it.

        What this process was saving meanwhile is deleted, too.

        Raises:
            NotReady: the store cannot be read or written; nothing was deleted.
        """
        self._deleting[id] += 1
        try:
            async with self._operation("read", id):
                await self._saves_ended(id)
            async with self._operation("write", id):
                deleted = await in_pool(self._pool, self._store.delete, id)
            self._store.drop_cached(id)
            self.stored -= deleted
            return deleted
        finally:
            self._deleting -= Counter((id,))

    async def all(self) -> list[tuple[Stored, str | None]]:
        """Return all extractors, each with one of its names; none while the store is unavailable.

        One listing at a time, in a thread of its own and page by page, so that no other use of the store waits for it.
        """
        found: list[tuple[Stored, str | None]] = []
        async with self._listing:
            pages = self._store.pages()
            while True:
                try:
                    async with self._operation("read", ""):
                        page = await in_pool(self._listings, next, pages, None)
                except NotReady:
                    return []
                if page is None:
                    return found
                found += page

    def is_saving(self, id: str) -> bool:
        """Return whether the extractor ``id`` is being saved, so that its token may be out of date."""
        return id in self._saving

    def is_deleting(self, id: str) -> bool:
        """Return whether a request is deleting the extractor ``id``."""
        return id in self._deleting

    async def _find(self, id_or_name: str) -> Stored | None:
        try:
            async with self._operation("read", id_or_name):
                found = await in_pool(self._pool, self._store.find, id_or_name)
        finally:
            del self._searches[id_or_name]
        if found is None:
            if len(self._missing) >= _MAX_MISSES:
                self._missing.clear()
            self._missing[id_or_name] = time.monotonic()
        return found

    async def _save(self, record: ExtractorRecord) -> tuple[Stored, bool]:
        """Save ``record``.

        A thread cannot be cancelled: after a timeout it goes on, and :meth:`delete` waits for it.
        """
        made = record.description
        fields = made.id, made.spec, made.weights, made.return_nodes, made.fingerprint
        save = background(in_pool(self._pool, self._store.put, *fields))
        saves = self._saves.setdefault(record.id, set())
        saves.add(save)

        def ended(save: asyncio.Task[tuple[Stored, bool]]) -> None:
            saves.discard(save)
            if not saves and self._saves.get(record.id) is saves:
                del self._saves[record.id]
            if not save.cancelled():
                save.exception()  # or asyncio would log it, where nobody waits any more

        save.add_done_callback(ended)
        return await asyncio.shield(save)

    async def _saves_ended(self, id: str) -> None:
        """Wait until the extractor ``id`` is not being saved."""
        while saves := self._saves.get(id):
            await asyncio.wait(set(saves))

    @asynccontextmanager
    async def _operation(self, operation: str, subject: str) -> AsyncIterator[None]:
        """Bound the time of what the store is asked for, and note what comes of it.

        Args:
            operation: ``read`` or ``write``.
            subject: the id or name that it is about.

        Raises:
            NotReady: the store is unavailable, or it fails.
        """
        if self._health.unavailable is not None:
            raise NotReady(self._health.unavailable, 1.0)
        try:
            async with self._health.in_time():
                yield
        except (StoreError, TimeoutError) as error:
            reason = self._health.failed(operation, error)
            log.warning("%s", reason)
            if isinstance(error, DamagedObject):
                self._health.damaged[subject] = reason
            elif operation == "write":
                self._health.unwritable = reason
            raise NotReady(reason, 1.0) from None
        if operation == "write":
            self._health.unwritable = None
