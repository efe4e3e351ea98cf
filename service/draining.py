"""What SIGTERM and SIGINT do: first refuse and finish, then end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from service.engine import Engine

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def drained_on_signals(engine: Engine) -> Iterator[None]:
    """Stand before the server's own signal handlers, inside the application's lifespan.

    The first signal makes the engine refuse new work, over connections that are still taken, so that clients are told
    to go elsewhere instead of being cut off. The server gets the signal, and closes, once what was accepted is
    answered, or at the end of the grace period, or when the same signal comes again. Where the event loop is not the
    process's main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    servers: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    draining: asyncio.Task[None] | None = None
    first = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        handler = servers[number]
        if callable(handler):
            handler(number, frame)

    async def drain(number: int, frame: FrameType | None) -> None:
        await engine.drain()
        pass_on(number, frame)

    def start(number: int, frame: FrameType | None) -> None:
        nonlocal draining
        draining = loop.create_task(drain(number, frame))

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first == number:
            pass_on(number, frame)
        elif not first:  # else a supervisor's SIGTERM after the terminal's SIGINT
            first = number
            engine.draining = True
            loop.call_soon_threadsafe(start, number, frame)

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for taken, handler in servers.items():
            if signal.getsignal(taken) is handle:
                signal.signal(taken, handler)
        if draining is not None:
            draining.cancel()
