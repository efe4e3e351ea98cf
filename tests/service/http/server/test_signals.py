"""SIGHUP while the service starts: it does not end the process, and what it is for is done once that is possible.
SIGTERM ends it even if nothing can be written."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import until
from tests.processes import free_port

ROOT = Path(__file__).parents[4]

SERVE = """
import os
import signal
from service.http.access import keys

class Interrupted(keys.Keys):
    count = 0
    def __init__(self, file):
        super().__init__(file)
        Interrupted.count += 1
        if Interrupted.count == 2:  # after the check of the settings
            file.write_text(os.environ["LATER"])
        os.kill(os.getpid(), signal.SIGHUP)

keys.Keys = Interrupted
from service.cli import main
main()
"""


def line(secret: str) -> str:
    return f"{secret}:read:{hashlib.sha256(secret.encode()).hexdigest()}\n"


@pytest.mark.exhaustive
def test_keys_that_change_during_the_start_are_read_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line("before"))
    port = free_port()
    settings = {"FXSERVE_API_KEYS_FILE": str(keys), "FXSERVE_DEVICE": "cpu", "FXSERVE_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve"],
        env={**os.environ, **settings, "LATER": line("after"), "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1"},
    )
    url = f"http://127.0.0.1:{port}/v1/models"

    def status(secret: str) -> int | None:
        assert process.poll() is None
        try:
            return httpx.get(url, headers={"authorization": f"Bearer {secret}"}).status_code
        except httpx.TransportError:
            return None

    try:
        until(lambda: status("after") == 200)
        assert status("before") == 401
    finally:
        process.terminate()
        process.wait(60)


def test_sigterm_ends_a_process_whose_output_cannot_be_written() -> None:
    script = """
import os, signal, sys
from service.http.server.signals import end_on_signals
end_on_signals()
sys.stdout = open("/dev/full", "w")
print("a line")
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0
