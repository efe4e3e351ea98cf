"""The shared store as requests use it: off the event loop, in bounded time, and read again only when it must be."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from service.engine.extractors.objects import DamagedObject, StoreError
from service.engine.extractors.store import Store, Stored
from service.engine.tasks import background
from service.engine.threads import Pool, in_pool, run_at_low_priority
from service.observability.metrics import Metrics
from service.problems import NotReady

log = logging.getLogger("fxserve.store")

T = TypeVar("T")

TIMEOUT_SECONDS = 5.0
"""After which the store is taken not to answer."""

CHECK_SECONDS = 2.0
"""Seconds for which a process relies on what it read, of an extractor that it uses and of the store itself."""

_DAMAGE_SECONDS = 60.0
_MAX_SEEN = 4096
_THREADS = 4


class Sharing:
    """Calls a store's methods in its own threads, and knows whether it can be used. For one event loop.

    Methods raise :class:`~service.problems.NotReady` if the store, or an object that they need, cannot be used.

    Args:
        store: what is shared.
        metrics: where its state and its errors are counted.

    Attributes:
        was_read: whether it could be read once.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.store = store
        self._up, self._errors = metrics.store_up, metrics.store_errors
        self._pool = Pool(_THREADS, "fxserve-store")
        self._lister = Pool(1, "fxserve-store-list", run_at_low_priority)
        self._writing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._listing = asyncio.Lock()
        self._unavailable: str | None = "the store of extractors has not been read yet"
        self._unwritable: str | None = "it has not been written yet"
        self._damaged: tuple[float, str | None] = -math.inf, None
        self.was_read = False
        self._checking: asyncio.Task[None] | None = None
        self._checked = -math.inf
        self._seen: dict[str, tuple[float, asyncio.Task[str | None]]] = {}

    async def start(self) -> None:
        """Start the threads, and look at the store for the first time."""
        for pool in (self._pool, self._lister):
            pool.start()
        self._checking = background(self._check(), "store")
        await self._checking

    def close(self) -> None:
        """Begin nothing more."""
        for pool in (self._pool, self._lister):
            pool.shutdown(wait=False, cancel_futures=True)

    def error(self) -> str | None:
        """What is wrong with the store; it is looked at again soon. Extractors in memory are served all the same."""
        self._check_soon()
        noticed, damage = self._damaged
        recent = time.monotonic() - noticed < _DAMAGE_SECONDS
        return self._unavailable or self._unwritable or (damage if recent else None)

    async def find(self, id_or_name: str, max_age: float = 0.0, expected: str | None = None) -> str | None:
        """Return the id of the extractor with that id or name, or None.

        Args:
            id_or_name: what to look for.
            max_age: seconds for which an earlier result is relied on.
            expected: an earlier result must be this one.
        """
        began, task = self._seen.get(id_or_name, (-math.inf, None))
        if task is not None and time.monotonic() - began < max_age:
            id = await asyncio.shield(task)
            if id == expected:
                return id
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        task = background(self.read(self.store.find, id_or_name), "store")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # all who wait may have left
        self._seen[id_or_name] = time.monotonic(), task
        return await asyncio.shield(task)

    async def all(self) -> list[tuple[Stored, str | None]]:
        """Return all extractors, each with one of its names; none while the store is unavailable.

        One listing at a time, in a thread of its own, so that no other use of the store waits for it.
        """
        found: list[tuple[Stored, str | None]] = []
        async with self._listing:
            pages = self.store.pages()
            try:
                while True:
                    self._require_available()
                    page = await self._answer("read", in_pool(self._lister, next, pages, None))
                    if page is None:
                        return found
                    found += page
            except NotReady:
                return []

    async def read(self, function: Callable[..., T], *args: object) -> T:
        """Call ``function``, which reads, in a thread."""
        self._require_available()
        return await self._answer("read", in_pool(self._pool, function, *args))

    async def write(self, id: str, function: Callable[..., T], *args: object) -> T:
        """Call ``function``, which writes what concerns the extractor ``id``, after what is being written of it.

        After a timeout, a thread goes on: what is written next must not overtake it.
        """
        self._require_available()
        result = await self._answer("write", self._in_turn(id, function, *args))
        self._unwritable = None
        return result

    def is_written(self, id: str) -> bool:
        """Return whether something of the extractor ``id`` is being written, so that what is read may be gone soon."""
        lock = self._writing.get(id)
        return lock is not None and lock.locked()

    async def _in_turn(self, id: str, function: Callable[..., T], *args: object) -> T:
        lock = self._writing.setdefault(id, asyncio.Lock())
        await lock.acquire()
        task = background(in_pool(self._pool, function, *args), "store")

        def ended(done: asyncio.Task[T]) -> None:
            lock.release()
            if not done.cancelled():
                done.exception()  # or asyncio logs it, where nobody waits any more

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    def _require_available(self) -> None:
        if self._unavailable is not None:
            self._check_soon()
            raise NotReady(self._unavailable, 1.0)

    async def _answer(self, kind: str, called: Awaitable[T]) -> T:
        """Wait for what was ``called``, which reads or writes (``kind``), for :data:`TIMEOUT_SECONDS` at most."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await called
        except (StoreError, TimeoutError) as error:
            self._errors.labels(kind).inc()
            reason = str(error) or f"the store of extractors {self.store.url} did not answer in {TIMEOUT_SECONDS:.0f} s"
            if reason not in (self._unavailable, self._unwritable):
                log.warning("%s; what is in memory is served", reason)
            if isinstance(error, DamagedObject):
                self._damaged = time.monotonic(), reason
            elif kind == "write":
                self._unwritable = reason
            self._check_soon(0.0)  # which decides whether the store is unavailable
            raise NotReady(reason, 1.0) from None

    def _check_soon(self, seconds: float = CHECK_SECONDS) -> None:
        """Begin to check the store in the background, unless that is being done or was begun ``seconds`` ago."""
        if time.monotonic() - self._checked >= seconds and (self._checking is None or self._checking.done()):
            self._checked = time.monotonic()
            self._checking = background(self._check(), "store")

    async def _check(self) -> None:
        """Find out whether the store can be read and, the first time and after an error, whether it can be written."""
        try:
            await self._answer("read", in_pool(self._pool, self.store.check))
        except NotReady as away:
            self._unavailable = away.extra["reason"]
            self._up.set(0)
            return
        if self._unavailable is not None and self.was_read:
            log.warning("the store of extractors %s is back", self.store.url)
        if self._unavailable is not None and self._unavailable == self._damaged[1]:
            self._damaged = -math.inf, None  # its mark was, and is not any more
        self._unavailable, self.was_read = None, True
        self._up.set(1)
        if self._unwritable is not None:
            with suppress(NotReady):
                await self._answer("write", in_pool(self._pool, self.store.probe))
                self._unwritable = None
