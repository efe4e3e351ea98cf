"""The end of a process whose device is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from service.http.server.lost_device import DEVICE_LOST

ROOT = Path(__file__).parents[4]

SERVE = """
from service.app import create_app
from service.http.server.run import run
from service.settings import Settings

settings = Settings()
app = create_app(settings)
app.state.fxserve.engine._worker.lost = "the device worker died of a CUDA error"
run(app, settings, "cpu")
"""


def test_a_device_lost_before_the_server_has_started_ends_it_with_the_same_status() -> None:
    environment = {**os.environ, "FXSERVE_PORT": "0", "FXSERVE_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", SERVE], env=environment, timeout=300, capture_output=True, text=True)
    assert ended.returncode == DEVICE_LOST, ended.stderr
    assert "the process ends with status" in ended.stderr
