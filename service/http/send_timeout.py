"""A time limit for clients to read what is written to them."""

from __future__ import annotations

import asyncio

SECONDS, BYTES = 10.0, 256 * 1024
"""A client that has to be waited for must read that many bytes of its answer in that time; pieces of it are that
large."""


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
        """Watch the client from now on, as writing waits for it."""
        self.stop()
        self._unread = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(SECONDS, self._check)

    def stop(self) -> None:
        """Watch no more, as it has read what was written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._unread - self._transport.get_write_buffer_size() >= BYTES:
            self.start()
        else:  # closing would wait for it to read
            self._transport.abort()
