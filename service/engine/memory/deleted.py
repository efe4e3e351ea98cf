"""Deleted extractors, until their memory is freed."""

from __future__ import annotations

import asyncio
import weakref
from concurrent.futures import Executor

from service.engine.runtime import Runtime
from service.garbage import tidy

TIDY_SECONDS = 10.0
"""Seconds between two collections of deleted extractors: every request feels a full collection."""


class Deleted:
    """Collects deleted extractors once nothing refers to them.

    Their graphs are reference cycles, which :func:`~service.garbage.tidy` has to collect. For one event loop.

    Args:
        pool: the threads that tidy.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        # Each with whether it was idle at the last look.
        self._left: list[tuple[weakref.ref[Runtime], bool]] = []
        self._later: asyncio.TimerHandle | None = None

    def add(self, runtime: Runtime) -> None:
        """Collect ``runtime`` within :data:`TIDY_SECONDS` of the end of its last request."""
        self._left.append((weakref.ref(runtime), False))
        if self._later is None:
            self._wait()

    def close(self) -> None:
        """Collect nothing more."""
        if self._later is not None:
            self._later.cancel()

    def _wait(self) -> None:
        self._later = asyncio.get_running_loop().call_later(TIDY_SECONDS, self._tidy)

    def _tidy(self) -> None:
        runtimes = [(left, left(), idle) for left, idle in self._left]
        if not all(runtime is not None and runtime.busy for _, runtime, _ in runtimes):
            self._pool.submit(tidy)
        # The last request may still refer to an idle one for a moment: it is looked at twice.
        self._left = [
            (left, not runtime.busy)
            for left, runtime, idle in runtimes
            if runtime is not None and (runtime.busy or not idle)
        ]
        self._later = None
        if self._left:
            self._wait()
