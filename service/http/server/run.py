"""Running of server processes: configuration of uvicorn, and exit."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from socket import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from service.garbage import exempt_imports
from service.http.server import protocol_choice
from service.http.server.server import Server
from service.http.server.shared_folder import shared_folder
from service.http.server.signals import release_reloads
from service.observability import logs
from service.observability.metrics import SHARED_DIR
from service.settings import SHARED_WEIGHTS, Settings

log = logging.getLogger("fxserve")

KEEP_ALIVE_SECONDS = 75
"""Timeout of idle connections: longer than that of nginx and AWS's load balancers (60 s), which would otherwise send
requests over closing connections, and longer than any ``Retry-After``."""


def run(app: FastAPI, settings: Settings, device: str) -> None:
    """Serve ``app`` in this process until a signal arrives, then finish accepted requests."""
    config = uvicorn.Config(app, **_options(settings))
    # asyncio would not accept IPv4 there. Several processes have such a socket anyway.
    sockets = [_bound(config)] if settings.host == "::" else None
    _Server(config, device).run(sockets)


def run_workers(settings: Settings, device: str) -> None:
    """Serve in several processes until a signal arrives. They read their settings from the environment.

    They share weights on the CPU; metrics, so that each can answer ``/metrics`` for all; and extractors, in a temporary
    folder if no store is configured.

    On Linux without a GPU they are forked from this process after all imports, so they start at once and share that
    memory. Neither CUDA nor Apple's frameworks can be used in forked processes.
    """
    with shared_folder() as folder:
        for name in ("metrics", "extractors", "weights"):
            (folder / name).mkdir()
        os.environ.setdefault(SHARED_DIR, str(folder / "metrics"))
        os.environ[SHARED_WEIGHTS] = str(folder / "weights")
        if settings.extractors is None:
            os.environ["FXSERVE_EXTRACTORS"] = str(folder / "extractors")
        print(_startup_line(settings.host, settings.port, f"{settings.workers} processes, {device}"), flush=True)
        # A process that does not answer pings for this long is replaced. Processes do not answer while they load the
        # operator's models or, if spawned, import torch.
        options = _options(settings) | {"timeout_worker_healthcheck": 120}
        forked = sys.platform == "linux" and device == "cpu"
        _supervise(
            "service.app:create_app", forked, settings.grace_period, factory=True, workers=settings.workers, **options
        )


def _supervise(app: str, forked: bool, grace: float, **options: Any) -> None:
    """Run uvicorn with our supervisor.

    If it is incompatible with this uvicorn, use uvicorn's own, which spawns processes.
    """
    try:
        from service.http.server.supervisor import Supervisor
    except ImportError as error:
        log.warning("server processes are spawned, and may be replaced late: %s", error)
        release_reloads()  # it replaces the processes on SIGHUP
        uvicorn.run(app, **options)
        return
    if forked:
        importlib.import_module(app.partition(":")[0])
        exempt_imports()
    config = uvicorn.Config(app, **options)
    with _bound(config) as listening:  # closed before the exit, which takes seconds: nobody would answer
        supervisor = Supervisor(config, [listening], grace, "fork" if forked else "spawn")
        supervisor.run()
    if status := supervisor.exit_status():
        sys.exit(status)


def _bound(config: uvicorn.Config) -> socket:
    """Bind the socket to listen on, or exit with an error message.

    uvicorn does so too, except if the address family is not supported.
    """
    try:
        return config.bind_socket()
    except OSError as error:
        sys.exit(f"fxserve: cannot listen on {config.host}: {error}")


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "host": settings.host,
        "port": settings.port,
        "log_config": logs.config(settings.log_format, settings.log_level),
        "log_level": settings.log_level,
        "access_log": False,  # replaced by our own, with the request's id and duration
        "server_header": False,
        # By name, because the class imports torch, and server processes unpickle these options before they answer
        # pings.
        "http": protocol_choice.chosen(),
        "ws": "none",
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        # For clients that do not read their responses, after the grace period of accepted requests.
        "timeout_graceful_shutdown": 2,
    }


def _startup_line(host: str, port: int, details: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{host}:{port}"
    return f"fxserve on {url} ({details}): open it in a browser; reference at {url}/docs, Ctrl-C ends it"


class _Server(Server):
    """Prints the server's URL once it listens."""

    def __init__(self, config: uvicorn.Config, device: str) -> None:
        super().__init__(config)
        self._device = device

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(_startup_line(host, port, self._device), flush=True)
