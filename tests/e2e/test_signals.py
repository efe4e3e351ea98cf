"""SIGTERM and Ctrl-C while a server starts."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import InterpretedServer, until
from tests.e2e.slow_models import SWITCH, slow_models


class Interpreted(InterpretedServer):
    """A server whose interpreter would take long to exit."""

    def command(self) -> list[str]:
        script = "import atexit, time; atexit.register(time.sleep, 1000); from service.cli import main; main()"
        return [sys.executable, "-c", script, *super().command()[3:]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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
