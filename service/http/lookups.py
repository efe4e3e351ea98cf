"""Slow GET requests, such as graphs, drawings and exports, which run in threads, limited in number and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, TypeVar

import orjson

from service import problems
from service.engine.requests.admission.admission import Admission
from service.engine.threads import Pool, RunInThread, in_pool
from service.http.scope import Caller
from service.problems import DeadlineExceeded

Result = TypeVar("Result")

LOOKUP_PROBLEMS = (problems.AdmissionFull, problems.DeadlineExceeded, problems.NotReady)
"""Problems of every route that uses :class:`Lookups`."""

_PAGE = 50
"""Number of items encoded at a time."""


class Lookups:
    """Runs slow GET requests in threads, each with a place in admission. For one event loop.

    Args:
        seconds: time limit of a request. Work already running in a thread continues after it, and occupies the thread.
        pool: the threads, which are used for nothing else; see :class:`~service.engine.threads.Threads`.
        max_requests: maximum requests in flight, shared fairly between clients as in :class:`Admission`.
    """

    def __init__(self, seconds: float, pool: Pool, max_requests: int = 16) -> None:
        self._seconds = seconds
        self._admission = Admission(max_requests, 0, pool.size)
        self._pool = pool

    @asynccontextmanager
    async def place(self, caller: Caller) -> AsyncIterator[RunInThread]:
        """Admit a request of ``caller``, and limit the time of the block.

        Yields the function that runs its work in a thread, once it is this client's turn. Call it only once.

        Raises:
            AdmissionFull: all places, or this client's share of them, are in use.
            DeadlineExceeded: the block exceeded the time limit.
        """
        with self._admission.enter(caller.client) as ticket:

            async def run(work: Callable[[], Result]) -> Result:
                await ticket.turn()
                return await in_pool(self._pool, work)

            try:
                async with asyncio.timeout(self._seconds) as limit:
                    yield run
            except TimeoutError:
                if limit.expired():
                    raise DeadlineExceeded from None
                raise


def json_array(items: Iterable[Any]) -> bytes:
    """Encode ``items`` as a JSON array, in pages, because encoding holds the GIL."""
    items = iter(items)
    pages = iter(lambda: list(islice(items, _PAGE)), [])
    return b"[" + b",".join(orjson.dumps(page)[1:-1] for page in pages) + b"]"
