"""What is under way, and waiting for its end."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

_DEPTH: ContextVar[int] = ContextVar("unfinished", default=0)


class Unfinished:
    """Counts the ``with`` blocks over it that have begun and not ended. For one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self.count += 1
        self._none.clear()
        _DEPTH.set(_DEPTH.get() + 1)

    def __exit__(self, *error: object) -> None:
        self.count -= 1
        if not self.count:
            self._none.set()
        _DEPTH.set(_DEPTH.get() - 1)

    @property
    def here(self) -> bool:
        """Whether the caller is in such a block."""
        return _DEPTH.get() > 0

    async def none(self) -> None:
        """Wait until there is none."""
        await self._none.wait()
