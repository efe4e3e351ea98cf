"""Wrappers of a connection's transport: heads sent together with bodies, and a timeout for slow readers."""

from __future__ import annotations

import asyncio

SEND_SECONDS, SEND_BYTES = 10.0, 256 * 1024
"""A client that blocks writing must read this many bytes within this many seconds."""


class HeadWithBody:
    """Wraps the transport for one response, to send its head together with the first chunk of its body.

    uvicorn writes the head separately, in an extra packet that wakes the client for nothing. The first write is delayed
    until the second, at most until the event loop's next iteration. Later writes pass through to the wrapped transport,
    which pauses writing for slow clients.
    """

    __slots__ = ("_head", "_loop", "_started", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.is_closing = transport.is_closing
        self._transport = transport
        self._loop = loop
        self._started = False
        self._head: bytes | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines((head, data))
        elif self._started:
            self._transport.write(data)
        else:
            self._started = True
            self._head = bytes(data)
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self.is_closing():
            self._transport.write(head)


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
        self._timer = self._loop.call_later(SEND_SECONDS, self._check)

    def stop(self) -> None:
        """Cancel the timeout, when writing resumes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._unread - self._transport.get_write_buffer_size() >= SEND_BYTES:
            self.start()
        else:  # closing would wait for the client to read
            self._transport.abort()
