"""In-flight requests, and waiting until there are none."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar


class InFlight:
    """Counts the ``with`` blocks over it that have begun and not ended. For one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._depth: ContextVar[int] = ContextVar("in_flight", default=0)  # how many such blocks the caller is inside

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()
        self._depth.set(self._depth.get() + 1)

    def __exit__(self, *error: object) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()
        self._depth.set(self._depth.get() - 1)

    @property
    def includes_caller(self) -> bool:
        """Whether the caller is inside such a block."""
        return self._depth.get() > 0

    async def wait_idle(self) -> None:
        """Wait until no block is open."""
        await self._idle.wait()
