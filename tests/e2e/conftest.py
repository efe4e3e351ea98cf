"""Real servers, each in its own process, reached over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
import torch
import torchvision

from tests.e2e.forked import Forked
from tests.processes import free_port

START_SECONDS = 300

T = TypeVar("T", bound="Server")


class Server:
    """A server in a separate process, with ``FXSERVE_*`` settings and its own weights cache.

    Attributes:
        process: the process, with the interface of :class:`subprocess.Popen`.
    """

    process: Forked | subprocess.Popen[bytes]

    def __init__(self, home: Path, **settings: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / f"server-{self.port}.log"
        self.http = httpx.Client(base_url=self.url, timeout=300)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FXSERVE_")}
        environment |= {"FXSERVE_LOWERING": "false", "FXSERVE_DEVICE": "cpu"}
        environment |= {f"FXSERVE_{key.upper()}": str(value) for key, value in settings.items()}
        # Give the servers no network, even if this machine has one.
        environment |= {"TORCH_HOME": str(home), "https_proxy": "http://127.0.0.1:9"}
        self._environment = environment
        self.begin()

    def begin(self) -> None:
        """Start the process, or a new one on the same port."""
        self.process = Forked(self.command(), self._environment, self.log)

    def command(self) -> list[str]:
        """Return the command of the process."""
        return ["fxserve", "serve", "--port", str(self.port)]

    def wait(self) -> None:
        """Wait until the server responds."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.http.get("/healthz")
            except httpx.TransportError:
                time.sleep(0.02)
            else:
                return
        pytest.fail(f"the server did not start:\n{self.log.read_text()}")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, method: str, path: str, **rest: Any) -> httpx.Response:
        """Send a request over a connection of its own, which any of the processes may take."""
        return httpx.request(method, self.url + path, timeout=120, **rest)

    def metric(self, line: str, **options: Any) -> float:
        """Return the value of the metric that starts with ``line``; 0 if there is none yet."""
        response = self.ask("GET", "/metrics", **options)
        assert response.status_code == 200, response.text
        for found in response.text.splitlines():
            if found.startswith(line):
                return float(found.rpartition(" ")[2])
        return 0.0

    def ready(self) -> float:
        """Return how many processes are ready; 0 where the connection was to one that ended."""
        with contextlib.suppress(httpx.TransportError):
            return self.metric("fxserve_ready ")
        return 0.0

    def children(self) -> set[int]:
        """Return the server processes that live, of several."""
        found = set()
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile; a zombie is one of these
                if "resource_tracker" not in " ".join(child.cmdline()):
                    found.add(child.pid)
        return found

    def stop(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(60)


class InterpretedServer(Server):
    """A server that starts in a new interpreter instead of a fork."""

    def begin(self) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command(), env=self._environment, stdout=log, stderr=subprocess.STDOUT)

    def command(self) -> list[str]:
        return [sys.executable, "-c", "from service.cli import main; main()", *super().command()[1:]]


def until(found: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait until ``found()`` is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


def response_of(connection: socket.socket) -> bytes:
    """All that comes back until the server closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return received


def connection_problem(received: bytes, status: int, kind: str) -> dict[str, str]:
    """Check a response that the connection itself sends, a problem like any other, and return its headers."""
    head, _, body = received.partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    headers = dict(field.lower().split(": ", 1) for field in fields)
    assert line.startswith(f"HTTP/1.1 {status} ")
    assert headers["content-type"] == "application/problem+json"
    assert headers["x-request-id"]
    assert int(headers["content-length"]) == len(body)
    document = json.loads(body)
    assert (document["status"], document["type"]) == (status, f"/problems/{kind}"), document
    return headers


@contextlib.contextmanager
def servers(kind: type[T], home: Path) -> Iterator[Callable[..., T]]:
    """Yield a function that starts servers with the weights cache ``home``: ``start(max_body_bytes=1000)``.

    All servers are stopped at the end.
    """
    (home / "hub/checkpoints").mkdir(parents=True, exist_ok=True)
    started: list[T] = []

    def start(**settings: Any) -> T:
        server = kind(home, **settings)
        started.append(server)
        server.wait()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="package")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start a server: ``start(max_body_bytes=1000)``."""
    home = tmp_path_factory.mktemp("torch-home")
    with servers(Server, home) as starts:
        torch.manual_seed(1)
        state = torchvision.models.squeezenet1_1(weights=None).state_dict()
        torch.save(state, home / "hub/checkpoints/squeezenet1_1-b8a52dc0.pth")
        yield starts


@pytest.fixture(scope="package")
def server(start: Callable[..., Server]) -> Server:
    """A server with default settings."""
    return start()
