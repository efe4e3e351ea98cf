"""Signals that end a server process, at once during startup and gracefully while it serves, or reload its API keys.

This module imports nothing heavy, because startup calls it first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from service.engine import Engine

ENDING = (signal.SIGTERM, signal.SIGINT)

RELOADING = (signal.SIGHUP,) if sys.platform != "win32" else ()


def end_on_signals() -> None:
    """Make :data:`ENDING` exit the process at once with code 0.

    While serving, uvicorn's handlers drain first and then raise the signal again, which calls these handlers. During
    startup they are the only ones; without them, the first process of a container would ignore the signals.
    """
    for number in ENDING:
        signal.signal(number, lambda number, frame: end())


def end(status: int = 0) -> NoReturn:
    """Exit the process at once.

    A regular exit would wait for all threads, and then free every object of torch, which takes seconds.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # its disk is full, or the signal came amid a line
            stream.flush()
    os._exit(status)


def hold_reloads() -> None:
    """Block :data:`RELOADING` until :func:`reload_on_signals`.

    During startup the signal would end the process. If it comes after the keys are read, they are read again.
    """
    if RELOADING:
        signal.pthread_sigmask(signal.SIG_BLOCK, RELOADING)


def release_reloads() -> None:
    """Undo :func:`hold_reloads`."""
    if RELOADING:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RELOADING)


def reload_on_signals(reload: Callable[[], None]) -> None:
    """Call ``reload`` on the running event loop at each of :data:`RELOADING`, and now if one is blocked.

    Does nothing if the event loop does not run in the main thread.
    """
    if not RELOADING or threading.current_thread() is not threading.main_thread():
        return
    for number in RELOADING:
        asyncio.get_running_loop().add_signal_handler(number, reload)
    release_reloads()


@contextmanager
def drained_on_signals(engine: Engine) -> Iterator[None]:
    """Drain the engine on a signal, before the server's own handler runs. For the application's lifespan.

    On the first signal the engine refuses new work, while the server still accepts connections: clients get 503 instead
    of a closed connection. The server's handler runs once all accepted requests are answered, at the end of the grace
    period, or on a second signal. Does nothing if the event loop does not run in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    servers: dict[int, Any] = {number: signal.getsignal(number) for number in ENDING}
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
        elif not first:  # ignore another signal, such as a supervisor's SIGTERM after SIGINT
            first = number
            engine.draining = True
            loop.call_soon_threadsafe(start, number, frame)

    for number in ENDING:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for taken, handler in servers.items():
            if signal.getsignal(taken) is handle:
                signal.signal(taken, handler)
        if draining is not None:
            draining.cancel()
