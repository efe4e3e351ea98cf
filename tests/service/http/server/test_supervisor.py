"""Server processes that fail to start: before any has, all end; later, another is started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import until

ROOT = Path(__file__).parents[4]

APP = """
import os
from pathlib import Path

def create():
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            if Path("no memory").exists():
                await send({"type": "lifespan.startup.failed", "message": "no memory"})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
    return app
"""

SERVE = """
import sys
from service.http.server.run import _supervise
if __name__ == "__main__":
    _supervise("app:create", factory=True, workers=2, port=int(sys.argv[1]), timeout_worker_healthcheck=60)
"""


class Processes:
    """Two server processes whose start fails while there is a file ``no memory`` in ``folder``."""

    def __init__(self, folder: Path) -> None:
        (folder / "app.py").write_text(APP)
        (folder / "serve.py").write_text(SERVE)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "serve.py", str(port)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "no_proxy": "127.0.0.1"},
                stdout=log,
                stderr=log,
            )

    def answering(self) -> set[int]:
        """The processes that answer some requests."""
        found = set()
        for _ in range(20):
            try:
                found.add(int(httpx.get(self.url).text))
            except httpx.TransportError:
                return set()
        return found


@pytest.mark.exhaustive
def test_a_process_that_cannot_replace_another_is_tried_again(tmp_path: Path) -> None:
    server = Processes(tmp_path)
    try:
        until(lambda: len(server.answering()) == 2)
        first, second = server.answering()
        (tmp_path / "no memory").touch()
        os.kill(first, signal.SIGKILL)
        until(lambda: server.log.read_text().count("failed to start; another is started") >= 2)
        assert server.answering() == {second}
        (tmp_path / "no memory").unlink()
        until(lambda: len(server.answering()) == 2)
        assert second in server.answering()
        server.process.terminate()
        assert server.process.wait(30) == 0
    finally:
        server.process.kill()


@pytest.mark.exhaustive
def test_processes_that_cannot_start_end_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "no memory").touch()
    server = Processes(tmp_path)
    try:
        assert server.process.wait(60) == 3
    finally:
        server.process.kill()
