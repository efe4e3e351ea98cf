"""A timeout for clients that read their responses too slowly."""

from __future__ import annotations

import asyncio

SECONDS, BYTES = 10.0, 256 * 1024
"""A client that blocks writing must read this many bytes within this many seconds."""


class SendTimeout:
    """Aborts a connection whose client reads too slowly.

    Args:
        transport: the connection's transport.
        loop: its event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0

    def start(self) -> None:
        """Start the timeout, when writing is paused."""
        self.stop()
        self._unread = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(SECONDS, self._check)

    def stop(self) -> None:
        """Cancel the timeout, when writing resumes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._unread - self._transport.get_write_buffer_size() >= BYTES:
            self.start()
        else:  # closing would wait for the client to read
            self._transport.abort()
