"""Start and stop the servers of the benchmarks on free ports of 127.0.0.1, and the process of ``ceiling.py``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil

HERE = Path(__file__).parent
READY_SECONDS = 180


class Server:
    """A running server.

    Attributes:
        port: the port it listens on.
        http: a client for requests that are not measured.
    """

    def __init__(self, command: list[str], port: int, environment: dict[str, str] | None = None) -> None:
        self.port = port
        self.log = tempfile.NamedTemporaryFile("w+", prefix="benchmark-", suffix=".log")  # noqa: SIM115
        self.process = psutil.Popen(
            command,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=HERE.parent,
            env={**os.environ, **(environment or {})},
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=READY_SECONDS)

    def wait(self, method: str, path: str, **options: object) -> httpx.Response:
        """Repeat a request until the response is 200.

        Raises:
            RuntimeError: the server ended or did not respond in time; the message has the end of its log.
        """
        deadline = time.monotonic() + READY_SECONDS
        answer = None
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                answer = self.http.request(method, path, **options)  # type: ignore[arg-type]
                if answer.status_code == 200:
                    return answer
            time.sleep(0.2)
        log = Path(self.log.name).read_text()[-3000:] + (answer.text[:500] if answer is not None else "")
        raise RuntimeError(f"{self.process.args} does not serve:\n{log}")

    def memory(self) -> int:
        """Return the resident bytes of the process and its children."""
        return sum(p.memory_info().rss for p in (self.process, *self.process.children(recursive=True)))

    def stop(self) -> None:
        self.http.close()
        family = []
        if self.process.poll() is None:
            family = [*self.process.children(recursive=True), self.process]
            self.process.terminate()
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        self.log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def fxserve(**settings: object) -> Iterator[Server]:
    """Run fxserve with ``FXSERVE_*`` settings, and yield it once it is ready."""
    port = free_port()
    environment = {f"FXSERVE_{key.upper()}": str(value) for key, value in settings.items()}
    command = [sys.executable, "-c", "from service.cli import main; main()", "serve", "--port", str(port)]
    server = Server(command, port, environment)
    try:
        server.wait("GET", "/readyz")
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def peer(name: str, model: str, nodes: str, precision: str = "float32") -> Iterator[Server]:
    """Run ``peers/<name>.py``, serving ``nodes`` (``node:key,node:key``) of ``model`` in float32 or bfloat16."""
    port = free_port()
    server = Server([sys.executable, str(HERE / "peers" / f"{name}.py"), model, nodes, str(port), precision], port)
    try:
        yield server
    finally:
        server.stop()


class Ceiling:
    """A running ``ceiling.py`` that has found the best configuration."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        found = json.loads(self._stdout.readline())
        self.backend: str = found["backend"]
        self.how: str = found["how"]

    def measure(self) -> float:
        """Measure images/s."""
        print(file=self._stdin, flush=True)
        rate: float = json.loads(self._stdout.readline())
        return rate


def _path() -> str:
    return os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextlib.contextmanager
def ceiling(
    spec: Mapping[str, object], seconds: float, settle: float, pooled: bool = False, latency: bool = False
) -> Iterator[Ceiling]:
    """Run ``ceiling.py`` for an extractor, with measurements of ``seconds``."""
    command = [sys.executable, str(HERE / "ceiling.py"), json.dumps(spec)]
    command += ["--seconds", str(seconds), "--settle", str(settle)]
    command += [*(["--pooled"] if pooled else []), *(["--latency"] if latency else [])]
    # The same setting that the service makes for itself before torch is loaded.
    environment = {**os.environ, "PYTHONPATH": _path(), "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield Ceiling(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
