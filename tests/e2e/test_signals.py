"""SIGTERM and Ctrl-C: while a server starts, while it answers, to all of its processes, and twice."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import InterpretedServer, Server, until
from tests.e2e.slow_models import SWITCH, slow_models

SLOW = "/v1/models/slow/features?nodes=stem&pool=avg"


@contextmanager
def answering(server: Server, models: Path, photo: bytes) -> Iterator[Future[httpx.Response]]:
    """Two server processes, one of which computes a request until the end of the block."""
    file = [("a.jpg", photo, "image/jpeg")]
    until(lambda: server.http.get("/readyz").status_code == 200)
    assert server.http.post(SLOW, files={"a": file[0]}).status_code == 200
    with ThreadPoolExecutor() as pool:
        (models / SWITCH).touch()
        try:
            answer = pool.submit(server.http.post, SLOW, files={"a": file[0]})
            until(lambda: server.metric("fxserve_inflight_requests") >= 1)
            yield answer
        finally:
            (models / SWITCH).unlink()


def shutting_down(server: Server) -> None:
    """Wait until all processes drain."""
    until(lambda: all("shutting down" in httpx.get(f"{server.url}/readyz").text for _ in range(20)))


@pytest.mark.exhaustive
def test_accepted_work_is_finished_if_all_processes_get_the_signal(
    start: Callable[..., Server], photos: dict[str, bytes], tmp_path: Path
) -> None:
    """As by systemd and Ctrl-C."""
    models = slow_models(tmp_path, slow="image = 1000")
    server = start(models_dir=models, workers=2, grace_period=300)
    with answering(server, models, photos["chelsea"]) as answer:
        server.process.send_signal(signal.SIGINT)
        shutting_down(server)
        for child in psutil.Process(server.process.pid).children():
            os.kill(child.pid, signal.SIGINT)
        time.sleep(3)  # work that is not finished is given up after two
        assert not answer.done()
    assert answer.result().status_code == 200
    assert server.process.wait(60) == 0


@pytest.mark.exhaustive
def test_a_second_signal_ends_all_processes(
    start: Callable[..., Server], photos: dict[str, bytes], tmp_path: Path
) -> None:
    models = slow_models(tmp_path, slow="image = 1000")
    server = start(models_dir=models, workers=2, grace_period=300)
    with answering(server, models, photos["chelsea"]) as answer:
        server.process.send_signal(signal.SIGTERM)
        shutting_down(server)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result().json()["type"] == "/problems/draining"
    assert server.process.wait(60) == 0


class Interpreted(InterpretedServer):
    """A server whose interpreter would take long to exit."""

    def command(self) -> list[str]:
        script = "import atexit, time; atexit.register(time.sleep, 1000); from service.cli import main; main()"
        return [sys.executable, "-c", script, *super().command()[3:]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGINT)])
def test_signals_end_a_server_that_loads_models(workers: int, number: int, tmp_path: Path) -> None:
    models = slow_models(tmp_path / "models", slow="build = 1000")
    (models / SWITCH).touch()
    server = Interpreted(tmp_path, models_dir=models, workers=workers, log_level="info")
    try:
        until(lambda: server.log.read_text().count("Waiting for application startup") == workers)
        server.process.send_signal(number)
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        (models / SWITCH).unlink()
        server.stop()
