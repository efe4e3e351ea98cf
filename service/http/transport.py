"""A transport that sends an answer's head together with the first piece of its body.

uvicorn writes the head by itself: an extra packet, for which the client wakes up without need.
"""

from __future__ import annotations

import asyncio


class HeadWithBody:
    """The transport for one answer.

    The first write is held back until the next, at most until the event loop's next iteration. Later ones go straight
    to the wrapped transport, which pauses writing for a client that does not read.
    """

    __slots__ = ("_begun", "_head", "_loop", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.is_closing = transport.is_closing
        self._transport = transport
        self._loop = loop
        self._begun = False
        self._head: bytes | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines((head, data))
        elif self._begun:
            self._transport.write(data)
        else:
            self._begun = True
            self._head = bytes(data)
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self.is_closing():
            self._transport.write(head)
