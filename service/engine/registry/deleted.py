"""Extractors that are known no more, until their memory is free."""

from __future__ import annotations

import asyncio
import weakref
from concurrent.futures import Executor

from service.engine.record import ExtractorRecord
from service.garbage import tidy

TIDY_SECONDS = 10.0
"""What left in so many seconds is collected at once, as a full collection is felt by every request."""


class Deleted:
    """Deleted extractors, each until nothing refers to it.

    Their graphs refer to themselves, so that :func:`~service.garbage.tidy` has to collect them. For one event loop.

    Args:
        pool: the threads that tidy.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        # With each, whether it was idle when it was looked for last.
        self._left: list[tuple[weakref.ref[ExtractorRecord], bool]] = []
        self._later: asyncio.TimerHandle | None = None

    def add(self, record: ExtractorRecord) -> None:
        """Collect what is left of ``record`` within :data:`TIDY_SECONDS` of the end of its last request."""
        self._left.append((weakref.ref(record), False))
        if self._later is None:
            self._wait()

    def close(self) -> None:
        """Collect nothing more."""
        if self._later is not None:
            self._later.cancel()

    def _wait(self) -> None:
        self._later = asyncio.get_running_loop().call_later(TIDY_SECONDS, self._tidy)

    def _tidy(self) -> None:
        records = [(left, left(), idle) for left, idle in self._left]
        if not all(record is not None and record.active for _, record, _ in records):
            self._pool.submit(tidy)
        # Who sent the last request may hold an idle one for a moment more: it is looked for twice.
        self._left = [
            (left, not record.active)
            for left, record, idle in records
            if record is not None and (record.active or not idle)
        ]
        self._later = None
        if self._left:
            self._wait()
