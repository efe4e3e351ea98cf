"""A counter of in-flight requests that can be awaited."""

from __future__ import annotations

import asyncio


class InFlight:
    """Counts the open ``with`` blocks over it. For one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()

    def __exit__(self, *error: object) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no block is open."""
        await self._idle.wait()
