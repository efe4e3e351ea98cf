"""Whether the shared store can be read and written, as its last operations found it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.engine.extractors.objects import DamagedObject, StoreError
from service.engine.extractors.store import Store
from service.engine.tasks import background
from service.engine.threads import Pool, in_pool
from service.observability.metrics import Metrics
from service.problems import NotReady

log = logging.getLogger("fxserve.store")

TIMEOUT_SECONDS = 5.0
"""After which the store is taken not to answer."""

CHECK_SECONDS = 2.0
"""Seconds for which a process relies on what it read, of an extractor that it uses and of the store itself."""

_DAMAGE_SECONDS = 60.0


class StoreHealth:
    """What is wrong with a store, for ``/readyz``, the metrics and those who want to use it. For one event loop.

    Args:
        store: what is used.
        pool: threads for it.
        metrics: where its state and its errors are counted.
    """

    def __init__(self, store: Store, pool: Pool, metrics: Metrics) -> None:
        self._store = store
        self._pool = pool
        self._up = metrics.store_up
        self._errors = metrics.store_errors
        self._unavailable: str | None = "the store of extractors has not been read yet"
        self._unwritable: str | None = None
        self._damaged: tuple[float, str] = 0.0, ""
        self._was_read = False
        self._look: asyncio.Task[None] | None = None
        self._looked = 0.0

    def never_read(self) -> str | None:
        """Why the store has not been read even once; None if it has."""
        self._look_again()
        return None if self._was_read else self._unavailable

    def error(self) -> str | None:
        """What is wrong with the store; it is looked at again soon. Extractors in memory are served all the same."""
        self._look_again()
        noticed, damage = self._damaged
        recent = time.monotonic() - noticed < _DAMAGE_SECONDS
        return self._unavailable or self._unwritable or (damage if damage and recent else None)

    async def look(self) -> None:
        """Find out whether the store can be read and, the first time and after an error, whether it can be written."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await in_pool(self._pool, self._store.check)
        except (StoreError, TimeoutError) as error:
            self._unavailable = self._failed("read", error)
            self._up.set(0)
            return
        first, self._was_read = not self._was_read, True
        if self._unavailable is not None and not first:
            log.warning("the store of extractors %s is back", self._store.url)
        self._unavailable = None
        self._up.set(1)
        if first or self._unwritable is not None:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await in_pool(self._pool, self._store.probe)
                self._unwritable = None
            except (StoreError, TimeoutError) as error:
                self._unwritable = self._failed("write", error)

    @asynccontextmanager
    async def operation(self, kind: str) -> AsyncIterator[None]:
        """Bound the time of an operation, ``read`` or ``write``, and note what comes of it.

        Raises:
            NotReady: the store is unavailable, or it fails.
        """
        if self._unavailable is not None:
            self._look_again()
            raise NotReady(self._unavailable, 1.0)
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                yield
        except (StoreError, TimeoutError) as error:
            reason = self._failed(kind, error)
            if isinstance(error, DamagedObject):
                self._damaged = time.monotonic(), reason
            elif kind == "write":
                self._unwritable = reason
            self._look_again(0.0)  # which decides whether the store is unavailable
            raise NotReady(reason, 1.0) from None
        if kind == "write":
            self._unwritable = None

    def _look_again(self, seconds: float = CHECK_SECONDS) -> None:
        """Begin to look at the store in the background, unless that is being done or was begun ``seconds`` ago."""
        if time.monotonic() - self._looked >= seconds and (self._look is None or self._look.done()):
            self._looked = time.monotonic()
            self._look = background(self.look(), "store")

    def _failed(self, kind: str, error: Exception) -> str:
        self._errors.labels(kind).inc()
        reason = str(error) or f"the store of extractors {self._store.url} did not answer in {TIMEOUT_SECONDS:.0f} s"
        if reason not in (self._unavailable, self._unwritable):
            log.warning("%s; what is in memory is served", reason)
        return reason
