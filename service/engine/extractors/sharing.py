"""Access to the shared store for requests: off the event loop, with timeouts and caching."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from service.engine.extractors.objects import StoreError, UnusableObject, Unwritable
from service.engine.extractors.store import Store, Stored
from service.engine.tasks import background
from service.engine.threads import Pool, in_pool, run_at_low_priority
from service.observability.metrics import Metrics
from service.problems import NotReady

log = logging.getLogger("fxserve.store")

T = TypeVar("T")

TIMEOUT_SECONDS = 5.0
"""Seconds after which a store operation times out."""

CHECK_SECONDS = 2.0
"""Seconds for which a process trusts what it last read about an extractor in use and about the store itself."""

_DAMAGE_SECONDS = 60.0
_MAX_SEEN = 4096
_THREADS = 4


class Sharing:
    """Calls a store's methods in its own threads, and tracks whether the store is usable. For one event loop.

    Methods raise :class:`~service.problems.NotReady` if the store or a required object cannot be used.

    Args:
        store: the shared store.
        metrics: counts its state and its errors.

    Attributes:
        was_read: whether it has ever been read successfully.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.store = store
        self._up, self._errors = metrics.store_up, metrics.store_errors
        self._pool = Pool(_THREADS, "fxserve-store")
        self._lister = Pool(1, "fxserve-store-list", run_at_low_priority)
        self._writing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unavailable: str | None = "the store of extractors has not been read yet"
        self._unwritable: str | None = "it has not been written yet"
        self._damaged: tuple[float, str | None] = -math.inf, None
        self.was_read = False
        self._checking: asyncio.Task[None] | None = None
        self._checked = -math.inf
        self._seen: dict[str, tuple[float, asyncio.Task[str | None]]] = {}

    async def start(self) -> None:
        """Start the threads and check the store for the first time."""
        for pool in (self._pool, self._lister):
            pool.start()
        self._checking = background(self._check(), "store")
        await self._checking

    def close(self) -> None:
        """Start no more operations."""
        for pool in (self._pool, self._lister):
            pool.shutdown(wait=False, cancel_futures=True)

    def error(self) -> str | None:
        """Return the store's current error, or None, and schedule a new check.

        Extractors in memory are served in any case.
        """
        self._check_soon()
        noticed, damage = self._damaged
        recent = time.monotonic() - noticed < _DAMAGE_SECONDS
        return self._unavailable or self._unwritable or (damage if recent else None)

    async def find(self, id_or_name: str, max_age: float = 0.0, expected: str | None = None) -> str | None:
        """Return the id of the extractor with that id or name, or None.

        Args:
            id_or_name: the id or name to look up.
            max_age: maximum age in seconds of a cached result.
            expected: use a cached result only if it equals this.
        """
        began, task = self._seen.get(id_or_name, (-math.inf, None))
        if task is not None and time.monotonic() - began < max_age:
            id = await asyncio.shield(task)
            if id == expected:
                return id
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        task = background(self.read(self.store.find, id_or_name), "store", shared=True)
        self._seen[id_or_name] = time.monotonic(), task
        return await asyncio.shield(task)

    async def all(self) -> list[tuple[Stored, str | None]] | None:
        """Return all extractors, each with one of its names; None while the store is unavailable.

        Listings take turns in a thread of their own, so that no other operation waits for them. One may read thousands
        of objects, so it is given up only if checks of the store fail meanwhile.
        """
        listing = background(in_pool(self._lister, self.store.all), "store", shared=True)
        try:
            while not listing.done():
                self._require_available()
                self._check_soon()
                await asyncio.wait({listing}, timeout=CHECK_SECONDS)
            return await self._answer("read", listing)
        except NotReady:
            return None
        finally:
            listing.cancel()  # if it has not begun

    async def read(self, function: Callable[..., T], *args: object) -> T:
        """Call ``function``, which reads from the store, in a thread."""
        self._require_available()
        return await self._answer("read", in_pool(self._pool, function, *args))

    async def write(self, id: str, function: Callable[..., T], *args: object) -> T:
        """Call ``function``, which may write data of the extractor ``id``, after all its earlier writes.

        After a timeout the thread keeps running, and the next write must not overtake it.
        """
        self._require_available()
        return await self._answer("write", self._in_turn(id, function, *args))

    async def _in_turn(self, id: str, function: Callable[..., T], *args: object) -> T:
        lock = self._writing.setdefault(id, asyncio.Lock())
        await lock.acquire()
        task = background(in_pool(self._pool, function, *args), "store", shared=True)
        task.add_done_callback(lambda done: lock.release())
        try:
            return await asyncio.shield(task)
        finally:
            del task  # the traceback of its error would hold it, and with it the error

    def _require_available(self) -> None:
        if self._unavailable is not None:
            self._check_soon()
            raise NotReady(self._unavailable, 1.0)

    async def _answer(self, kind: str, called: Awaitable[T]) -> T:
        """Wait at most :data:`TIMEOUT_SECONDS` for ``called``, a read or write (``kind``)."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await called
        except (StoreError, TimeoutError) as error:
            if isinstance(error, StoreError):  # what writes reads first
                kind = "write" if isinstance(error, Unwritable) else "read"
            self._errors.labels(kind).inc()
            reason = str(error) or f"the store of extractors {self.store.url} did not answer in {TIMEOUT_SECONDS:.0f} s"
            if reason not in (self._unavailable, self._unwritable):
                log.warning("%s; what is in memory is served", reason)
            if isinstance(error, UnusableObject):
                self._damaged = time.monotonic(), reason
            elif kind == "write":
                self._unwritable = reason
            self._check_soon(0.0)  # it decides whether the store is unavailable
            raise NotReady(reason, 1.0) from None

    def _check_soon(self, seconds: float = CHECK_SECONDS) -> None:
        """Start a background check of the store, unless one is running or was started less than ``seconds`` ago."""
        if time.monotonic() - self._checked >= seconds and (self._checking is None or self._checking.done()):
            self._checked = time.monotonic()
            self._checking = background(self._check(), "store")

    async def _check(self) -> None:
        """Check that the store can be read and, the first time and after an error, that it can be written."""
        try:
            await self._answer("read", in_pool(self._pool, self.store.check))
        except NotReady as away:
            self._unavailable = away.extra["reason"]
            self._up.set(0)
            return
        if self._unavailable is not None and self.was_read:
            log.warning("the store of extractors %s is back", self.store.url)
        if self._unavailable is not None and self._unavailable == self._damaged[1]:
            self._damaged = -math.inf, None  # its mark was damaged and no longer is
        self._unavailable, self.was_read = None, True
        self._up.set(1)
        if self._unwritable is not None:
            with suppress(NotReady):
                await self._answer("write", in_pool(self._pool, self.store.check, True))
                self._unwritable = None
