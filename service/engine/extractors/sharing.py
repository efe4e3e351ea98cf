"""The shared store as requests use it: off the event loop, in bounded time, and read again only when it must be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from service.engine.extractors.store import Store, Stored
from service.engine.extractors.store_health import CHECK_SECONDS, StoreHealth
from service.engine.tasks import background
from service.engine.threads import Pool, in_pool, run_at_low_priority
from service.observability.metrics import Metrics
from service.problems import NotReady, StoreFull

T = TypeVar("T")

NAMES_PER_EXTRACTOR = 4
"""How many times as many names as extractors the store may have."""

_COUNT_SECONDS = 60.0
_MAX_SEEN = 4096
_THREADS = 4


class Sharing:
    """Finds, saves, names and deletes extractors in a store, in its own threads. For one event loop.

    Methods raise :class:`~service.problems.NotReady` if the store, or an object that they need, cannot be used.

    Args:
        store: what is shared.
        metrics: where the store's state and errors are counted.
        limit: maximum extractors in the store, about: processes that save at the same time may exceed it.

    Attributes:
        health: whether the store can be used.
    """

    def __init__(self, store: Store, metrics: Metrics, limit: int) -> None:
        self._store = store
        self._limit = limit
        self._pool = Pool(_THREADS, "fxserve-store")
        self._listings = Pool(1, "fxserve-store-list", run_at_low_priority)
        self._listing = asyncio.Lock()
        self.health = StoreHealth(store, self._pool, metrics)
        self._stored = self._named = 0
        self._counted = -_COUNT_SECONDS
        self._seen: dict[str, tuple[float, asyncio.Task[str | None]]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Start the threads, and look at the store for the first time."""
        self._pool.start()
        self._listings.start()
        await self.health.look()

    def close(self) -> None:
        """Begin nothing more."""
        for pool in (self._pool, self._listings):
            pool.shutdown(wait=False, cancel_futures=True)

    async def find(self, id_or_name: str, max_age: float = 0.0, expected: str | None = None) -> str | None:
        """Return the id of the extractor with that id or name, or None.

        Args:
            id_or_name: what to look for.
            max_age: seconds for which an earlier result is relied on.
            expected: an earlier result must be this one.
        """
        began, task = self._seen.get(id_or_name, (0.0, None))
        if task is not None and time.monotonic() - began < max_age:
            id = await asyncio.shield(task)
            if id == expected:
                return id
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        task = background(self._read(self._store.find, id_or_name), "store")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # all who wait may have left
        self._seen[id_or_name] = time.monotonic(), task
        return await asyncio.shield(task)

    async def get(self, id: str) -> Stored | None:
        """Return the extractor ``id``; None if it does not exist."""
        return await self._read(self._store.get, id)

    async def put(self, stored: Stored, asked_for: bool = False) -> bool:
        """Save an extractor unless the store has it. Returns whether it is new.

        Args:
            stored: the extractor.
            asked_for: whether a client asked for it to be kept. What one-step requests make on their way is saved until
                the store is half full only, so that those cannot fill it.

        Raises:
            StoreFull: the store has as many extractors as it may.
        """
        await self._count()
        room = self._stored < (self._limit if asked_for else self._limit // 2)
        new = await self._write(stored.id, self._store.put, stored, room)
        if new is None:
            raise StoreFull("extractors", self._stored, self._limit)
        self._stored += new
        return new

    async def claim(self, name: str, id: str, may_replace: Callable[[str], bool]) -> str:
        """Give ``name`` to ``id``, unless another has it that may not be replaced; the id that has it then.

        Raises:
            StoreFull: the store has as many names as it may.
        """
        await self.check_names(name)
        owner = await self._write(id, self._store.claim, name, id, may_replace)
        self._named += 1  # or it had the name: it is counted again
        return owner

    async def check_names(self, name: str) -> None:
        """Check that the store has ``name`` or room for it.

        Raises:
            StoreFull: it has not.
        """
        await self._count()
        most = NAMES_PER_EXTRACTOR * self._limit
        if self._named >= most and await self._read(self._store.owner, name) is None:
            raise StoreFull("names", self._named, most)

    async def delete(self, id: str) -> None:
        """Delete the extractor ``id`` and its names in all processes. If this raises, it was not deleted."""
        self._stored -= await self._write(id, self._store.delete, id)

    async def was_deleted(self, id: str) -> bool:
        """Return whether the extractor ``id`` was preloaded once, and does not exist."""
        return await self._read(self._store.was_deleted, id)

    async def mark_preloaded(self, id: str) -> None:
        """Record that the extractor ``id`` was preloaded."""
        await self._write(id, self._store.mark_preloaded, id)

    async def all(self) -> list[tuple[Stored, str | None]]:
        """Return all extractors, each with one of its names; none while the store is unavailable.

        One listing at a time, in a thread of its own and page by page, so that no other use of the store waits for it.
        """
        found: list[tuple[Stored, str | None]] = []
        async with self._listing:
            pages = self._store.pages()
            try:
                while True:
                    async with self.health.operation("read"):
                        page = await in_pool(self._listings, next, pages, None)
                    if page is None:
                        return found
                    found += page
            except NotReady:
                return []

    async def _count(self) -> None:
        """Count what the store has once a minute, and before it is called full."""
        age = time.monotonic() - self._counted
        full = self._stored >= self._limit or self._named >= NAMES_PER_EXTRACTOR * self._limit
        if age >= _COUNT_SECONDS or (full and age >= CHECK_SECONDS):
            self._stored, self._named = await self._read(self._store.counts)
            self._counted = time.monotonic()

    async def _read(self, function: Callable[..., T], *args: object) -> T:
        async with self.health.operation("read"):
            return await in_pool(self._pool, function, *args)

    async def _write(self, id: str, function: Callable[..., T], *args: object) -> T:
        """Write what concerns ``id`` after what this process is writing of it.

        A thread cannot be cancelled: after a timeout it goes on, and what comes next must not overtake it.
        """
        async with self.health.operation("write"):
            lock = self._locks.setdefault(id, asyncio.Lock())
            await lock.acquire()
            task = background(in_pool(self._pool, function, *args), "store")

            def ended(done: asyncio.Task[T]) -> None:
                lock.release()
                if not done.cancelled():
                    done.exception()  # or asyncio logs it, where nobody waits any more

            task.add_done_callback(ended)
            return await asyncio.shield(task)
