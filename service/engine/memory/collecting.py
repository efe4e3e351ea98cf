"""Collects extractors that were deleted or evicted, whose graphs are reference cycles."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from fxcore.memory import give_back

COLLECT_SECONDS = 1.0
"""Seconds after which what was retired is collected: its last request may still refer to it for a moment, and every
request feels a collection."""


class Collector:
    """Has garbage collected in the background. For one event loop.

    Args:
        pool: the threads that collect.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._later: asyncio.TimerHandle | None = None
        self._closed = False

    def soon(self) -> None:
        """Collect once within :data:`COLLECT_SECONDS`, for all who ask meanwhile."""
        if self._later is None and not self._closed:
            self._later = asyncio.get_running_loop().call_later(COLLECT_SECONDS, self.now)

    def now(self) -> None:
        """Collect as soon as a thread is free."""
        self._cancel()
        if not self._closed:
            self._pool.submit(give_back)

    def close(self) -> None:
        """Collect nothing more."""
        self._closed = True
        self._cancel()

    def _cancel(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
