"""Child processes end with the process that started them, however that ends, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import running

ROOT = Path(__file__).parents[3]

PROGRAM = """
import os, subprocess, time
from fxcore.backends import process

def work(folder):
    compiler = subprocess.Popen(["sleep", "1000"])  # as inductor runs a C++ compiler
    (folder / "begun").write_text(f"{os.getpid()} {compiler.pid}")
    (folder / "begun").rename(folder / "running")
    time.sleep(1000)

if __name__ == "__main__":
    process.main(work)
"""

PARENT = """
from pathlib import Path
from fxcore.backends import process

process.run("program", Path("making"), {})
"""


@pytest.mark.exhaustive
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    making = tmp_path / "making"
    making.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 120
    while not (making / "running").exists():
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.05)
    processes = [int(text) for text in (making / "running").read_text().split()]
    try:
        assert all(map(running, processes))
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while any(map(running, processes)) or making.exists():
            assert time.monotonic() < deadline, "it goes on without its parent"
            time.sleep(0.05)
    finally:
        for process in filter(running, processes):
            os.kill(process, signal.SIGKILL)
