"""A time limit for clients to read what is written to them."""

from __future__ import annotations

import asyncio

SECONDS, BYTES = 10.0, 256 * 1024
"""A client that the server waits for must read so many bytes of its answer in so many seconds; answers are sent in
pieces of that size."""


class SendTimeout:
    """Aborts a connection whose client reads too slowly.

    Args:
        transport: of the connection.
        loop: that it runs on.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0

    def start(self) -> None:
        """Start the time limit: writing waits for the client."""
        self.stop()
        self._unread = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(SECONDS, self._check)

    def stop(self) -> None:
        """End the time limit: the client has read what was written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._unread - self._transport.get_write_buffer_size() >= BYTES:
            self.start()
        else:  # closing would wait for it to read
            self._transport.abort()
