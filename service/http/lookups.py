"""Slow GETs, such as graphs, drawings and exports, run in threads, bounded in number and in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from service.engine.device.threads import Pool, in_pool, run_at_low_priority
from service.engine.errors import DeadlineExceeded
from service.engine.requests.admission import Admission, Ticket

Result = TypeVar("Result")

LOOKUP_PROBLEMS = ("admission-full", "deadline-exceeded", "not-ready")
"""Problems of every route that uses :class:`Lookups`."""


class Lookups:
    """Runs the slow GETs in threads of their own, each with a place in admission. For one event loop.

    The threads are not those that build extractors or answer features, so that neither waits for a graph. Their
    priority is low, as tracing or drawing a large model takes a core for seconds.

    Args:
        seconds: after which a request fails. The work that a thread has begun for it goes on, and occupies the thread.
        at_once: threads.
        most: requests at a time; clients share them and take turns as in :class:`Admission`.
    """

    def __init__(self, seconds: float, at_once: int = 2, most: int = 16) -> None:
        self._seconds = seconds
        self._admission = Admission(most, 0, at_once)
        self._pool = Pool(at_once, "fxserve-lookup", run_at_low_priority)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Hold a place.

        Raises:
            AdmissionFull: all places, or this client's share of them, are taken.
            DeadlineExceeded: the block took longer than is allowed.
        """
        with self._admission.enter() as ticket:
            try:
                async with asyncio.timeout(self._seconds) as limit:
                    yield Place(ticket, self._pool)
            except TimeoutError:
                if limit.expired():
                    raise DeadlineExceeded from None
                raise

    def start(self) -> None:
        """Start the threads."""
        self._pool.start()

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Place:
    """One request's place."""

    def __init__(self, ticket: Ticket, pool: Pool) -> None:
        self._ticket = ticket
        self._pool = pool

    async def run(self, work: Callable[[], Result]) -> Result:
        """What ``work()`` returns or raises in a thread, once it is this client's turn. To be called once."""
        await self._ticket.turn()
        return await in_pool(self._pool, work)
