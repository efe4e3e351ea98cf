"""A server process around the application: what it prints, and how it ends."""

from __future__ import annotations

import math
import os
import signal
import sys
from socket import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from service.connection import Connection
from service.settings import Settings


def end_on_signals() -> None:
    """Make SIGTERM and SIGINT end the process at once, with exit code 0.

    While it serves, uvicorn has its own handlers, which drain first and then hand the signal on to these. Before that
    they are all there is: the first process of a container ignores a signal that it has no handler for.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def run(app: FastAPI, settings: Settings, device: str, log_level: str) -> None:
    """Serve ``app`` until a signal, then finish what was accepted."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level=log_level,
        server_header=False,
        http=Connection,
        ws="none",
        timeout_graceful_shutdown=math.ceil(settings.request_timeout),
    )
    _Server(config, device).run()


class _Server(uvicorn.Server):
    """Says where it listens in one line, once it does."""

    def __init__(self, config: uvicorn.Config, device: str) -> None:
        super().__init__(config)
        self._device = device

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
            url = f"http://{host}:{port}"
            print(f"fxserve on {url} ({self._device}), docs at {url}/docs, Ctrl-C ends it", flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    # Python's own way out collects every object of torch first: seconds, on a busy machine, of a grace period of ten.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
