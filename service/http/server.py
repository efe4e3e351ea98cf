"""Running server processes: their output, signals and end."""

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

    While it serves, uvicorn's handlers drain first and then raise the signal for these. Before that these are the only
    ones: the first process of a container ignores a signal without a handler.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def run(app: FastAPI, settings: Settings, device: str, log_level: str) -> None:
    """Serve ``app`` until a signal, then finish accepted requests."""
    config = uvicorn.Config(app, **_options(settings, log_level))
    _Server(config, device).run()


def run_workers(settings: Settings, device: str, log_level: str) -> None:
    """Serve with several processes, which read their settings from the environment, until a signal.

    They share metrics: each answers ``/metrics`` for all. They share their extractors, in a temporary folder if the
    settings name no store.
    """
    with tempfile.TemporaryDirectory(prefix="fxserve-") as folder:
        for name in ("metrics", "extractors"):
            os.mkdir(os.path.join(folder, name))
        os.environ.setdefault(SHARED_DIR, os.path.join(folder, "metrics"))
        if settings.extractors is None:
            os.environ["FXSERVE_EXTRACTORS"] = os.path.join(folder, "extractors")
        print(_greeting(settings.host, settings.port, f"{settings.workers} processes, {device}"), flush=True)
        # A process that does not answer for this long is replaced, and one started by SIGHUP has this long to be ready:
        # it imports torch and tries the operator's models, on a busy machine.
        options = _options(settings, log_level) | {"timeout_worker_healthcheck": 120}
        _supervise("service.app:create_app", factory=True, workers=settings.workers, **options)


def _supervise(app: str, **options: Any) -> None:
    """``uvicorn.run``, with ended server processes replaced at once if uvicorn's supervisor allows it."""
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
        "access_log": False,  # our own log line has the request's id and its duration
        "server_header": False,
        # By name: a server process gets these before it answers the supervisor, and the class imports torch.
        "http": protocol_choice.chosen(),
        "ws": "none",
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        # Accepted requests have had their grace period by then; this is for clients that do not read their answers.
        "timeout_graceful_shutdown": 2,
    }


def _greeting(host: str, port: int, how: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{host}:{port}"
    return f"fxserve on {url} ({how}): open it in a browser; reference at {url}/docs, Ctrl-C ends it"


class _Server(uvicorn.Server):
    """Prints the address in one line, once the server listens."""

    def __init__(self, config: uvicorn.Config, device: str) -> None:
        super().__init__(config)
        self._device = device

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(_greeting(host, port, self._device), flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    # Python's own exit would collect every object of torch first, which takes seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
