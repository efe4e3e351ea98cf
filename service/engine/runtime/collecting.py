"""Garbage collection of deleted or evicted extractors, whose graphs are reference cycles."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from fxcore.memory import give_back

COLLECT_SECONDS = 1.0
"""Delay of a collection in seconds: the last request may still refer to a retired runtime for a moment, and every
collection slows down requests."""


class Collector:
    """Runs garbage collections in the background. For one event loop.

    Args:
        pool: the threads that run collections.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._later: asyncio.TimerHandle | None = None
        self._closed = False

    def soon(self) -> None:
        """Schedule one collection within :data:`COLLECT_SECONDS`, shared by all calls until then."""
        if self._later is None and not self._closed:
            self._later = asyncio.get_running_loop().call_later(COLLECT_SECONDS, self.now)

    def now(self) -> None:
        """Collect as soon as a thread is free."""
        self._cancel()
        if not self._closed:
            self._pool.submit(give_back)

    def close(self) -> None:
        """Stop collecting."""
        self._closed = True
        self._cancel()

    def _cancel(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
