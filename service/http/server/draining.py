"""Graceful shutdown on SIGTERM and SIGINT: refuse new work, finish accepted requests, then stop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.engine import Engine
from service.http.access.callers import caller_of, set_caller
from service.http.problem_responses import error_response
from service.problems import Draining

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Accepted:
    """Middleware that registers each request with the engine, so that draining waits for it.

    A request that the server cancels before its response has started is answered 503.
    """

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        responded = False

        async def send_response(message: Message) -> None:
            nonlocal responded
            responded = True
            await send(message)

        accepted = not self.engine.draining
        set_caller(scope, replace(caller_of(scope), accepted=accepted))
        try:
            with self.engine.in_flight if accepted else nullcontext():
                await self.app(scope, receive, send_response)
        except asyncio.CancelledError:
            if responded or not self.engine.draining:
                raise
            await error_response(scope["path"], Draining())(scope, receive, send)


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
        elif not first:  # ignore another signal, such as a supervisor's SIGTERM after SIGINT
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
