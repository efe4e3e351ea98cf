"""The end of a process whose device is lost."""

from __future__ import annotations

import os
from pathlib import Path

from service.http.server.lost_device import DEVICE_LOST
from tests.e2e.forked import script

SERVE = """
from service.app import create_app
from service.http.server.run import run
from service.settings import Settings

settings = Settings()
app = create_app(settings)
app.state.fxserve.engine._worker.lost = "the device worker died of a CUDA error"
run(app, settings, "cpu")
"""


def test_a_device_lost_before_the_server_has_started_ends_it_with_the_same_status(tmp_path: Path) -> None:
    environment = {**os.environ, "FXSERVE_PORT": "0", "FXSERVE_DEVICE": "cpu"}
    status = script(SERVE, tmp_path, environment=environment).wait(300)
    said = (tmp_path / "stderr").read_text()
    assert status == DEVICE_LOST, said
    assert "the process ends with status" in said
