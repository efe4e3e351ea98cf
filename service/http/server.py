"""A server process around the application: what it prints, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from socket import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from service.http import protocol_choice
from service.observability import logs
from service.observability.metrics import SHARED_DIR
from service.settings import Settings

log = logging.getLogger("fxserve")

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept: longer than proxies keep theirs, 60 s in nginx and in AWS's load balancers,
which would otherwise send requests into connections that are being closed; and longer than any ``Retry-After``."""


def end_on_signals() -> None:
    """Make SIGTERM and SIGINT end the process at once, with exit code 0.

    While it serves, uvicorn has its own handlers, which drain first and then hand the signal on to these. Before that
    they are all there is: the first process of a container ignores a signal that it has no handler for.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def run(app: FastAPI, settings: Settings, device: str, log_level: str) -> None:
    """Serve ``app`` until a signal, then finish what was accepted."""
    config = uvicorn.Config(app, **_options(settings, log_level))
    _Server(config, device).run()


def run_workers(settings: Settings, device: str, log_level: str) -> None:
    """Serve with several processes, which read their settings from the environment, until a signal.

    They count together: whichever is asked for ``/metrics`` answers for all. They know the same extractors, which they
    keep in a folder of their own where the settings name no store.
    """
    with tempfile.TemporaryDirectory(prefix="fxserve-") as folder:
        for name in ("metrics", "extractors"):
            os.mkdir(os.path.join(folder, name))
        os.environ.setdefault(SHARED_DIR, os.path.join(folder, "metrics"))
        if settings.extractors is None:
            os.environ["FXSERVE_EXTRACTORS"] = os.path.join(folder, "extractors")
        print(_greeting(settings.host, settings.port, f"{settings.workers} processes, {device}"), flush=True)
        # One that is silent for this long is replaced, and the one that SIGHUP begins has this long to be ready: torch
        # has to be imported and each model of one's own to be tried, on a machine that is busy.
        options = _options(settings, log_level) | {"timeout_worker_healthcheck": 120}
        _supervise("service.app:create_app", factory=True, workers=settings.workers, **options)


def _supervise(app: str, **options: Any) -> None:
    """``uvicorn.run``, and each server process is replaced as soon as it has ended where uvicorn lets that be done."""
    try:
        from service.http.supervisor import Supervisor
    except ImportError as error:
        log.warning("server processes that end are replaced later than they could be: %s", error)
        uvicorn.run(app, **options)
        return
    config = uvicorn.Config(app, **options)
    Supervisor(config, [config.bind_socket()]).run()


def _options(settings: Settings, log_level: str) -> dict[str, Any]:
    return {
        "host": settings.host,
        "port": settings.port,
        "log_config": logs.config(settings.log_format, log_level),
        "log_level": log_level,
        "access_log": False,  # ours knows the request's id and how long it took
        "server_header": False,
        # By name: a server process gets these before it can say that it lives, and the class needs torch.
        "http": protocol_choice.chosen(),
        "ws": "none",
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        # What was accepted has had its grace period by then; this is for answers that nobody reads.
        "timeout_graceful_shutdown": 2,
    }


def _greeting(host: str, port: int, how: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{host}:{port}"
    return f"fxserve on {url} ({how}): open it in a browser; reference at {url}/docs, Ctrl-C ends it"


class _Server(uvicorn.Server):
    """Says where it listens in one line, once it does."""

    def __init__(self, config: uvicorn.Config, device: str) -> None:
        super().__init__(config)
        self._device = device

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(_greeting(host, port, self._device), flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    # Python's own way out collects every object of torch first: seconds, on a busy machine, of a grace period of ten.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
