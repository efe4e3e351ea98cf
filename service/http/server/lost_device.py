"""Exit of a process that has lost its device: only a new process can use the device again."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.engine import Engine
from service.http.server.signals import end

log = logging.getLogger("fxserve")

DEVICE_LOST = 5
"""Exit status of a process whose device is lost."""

_LOOK_SECONDS = 0.5

_SHUTDOWN_SECONDS = 10.0
"""Seconds for the server to shut down after the grace period, before the process is ended forcibly."""


@asynccontextmanager
async def ended_when_device_lost(engine: Engine) -> AsyncIterator[None]:
    """End the process with status :data:`DEVICE_LOST` once the device of ``engine`` is lost.

    The server shuts down as on SIGTERM: in-flight requests are answered first. The supervisor is expected to start a
    new process. Use it in the application's lifespan, around everything that is closed at its end. Outside the main
    thread, for example in a program that embeds the application, the process is not ended; its liveness probes fail
    instead.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    lost = asyncio.Event()
    watch = asyncio.create_task(_watch(engine, lost))
    try:
        yield
    finally:
        if lost.is_set():
            end(DEVICE_LOST)  # a regular exit frees CUDA's objects, which fails on a lost device
        watch.cancel()


async def _watch(engine: Engine, lost: asyncio.Event) -> None:
    why = None
    while why is None:
        await asyncio.sleep(_LOOK_SECONDS)  # first: a signal before the server has started ends the process with 0
        if engine.draining:  # the process is about to end anyway
            return
        why = engine.device_lost()
    lost.set()
    log.critical("%s; the process ends with status %d", why, DEVICE_LOST)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(engine.settings.grace_period + _SHUTDOWN_SECONDS)
    end(DEVICE_LOST)
