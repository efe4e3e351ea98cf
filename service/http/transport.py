"""A transport that sends a response's head together with the first chunk of its body.

uvicorn writes the head separately, in an extra packet that wakes up the client for nothing.
"""

from __future__ import annotations

import asyncio


class HeadWithBody:
    """Wraps the transport for one response.

    The first write is delayed until the second, at most until the event loop's next iteration. Later writes pass
    through to the wrapped transport, which pauses writing for slow clients.
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
