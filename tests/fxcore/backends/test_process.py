"""Child processes end with the process that started them, however that ends, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from fxcore.backends import process
from tests.e2e.forked import script
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
import sys
from pathlib import Path
from fxcore.backends import process

process.run("program", Path(sys.argv[1]), {})
"""


KILLED = """
import os, signal, tempfile
from fxcore.backends import process

def work(folder):
    (folder / "temporary").write_text(tempfile.mkdtemp())
    print("Applying Fast Bias correction 100% 49/49", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    process.main(work)
"""


@pytest.mark.exhaustive
def test_a_child_that_is_killed_says_so_and_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    monkeypatch.syspath_prepend(tmp_path)
    making = tmp_path / "making"
    making.mkdir()
    with pytest.raises(process.ProcessFailed, match=r"was killed by SIGKILL, probably for lack of memory; last: App"):
        process.run("killed", making, {})
    temporary = Path((making / "temporary").read_text())
    assert temporary.is_relative_to(making)
    assert sorted(file.name for file in making.iterdir()) == ["log", "temporary"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSEGV, "was killed by SIGSEGV, a crash in a native library"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (40, "was killed by signal 40"),
    ],
)
def test_only_a_crash_is_called_one(number: int, said: str) -> None:
    assert process._killed(number) == said


@pytest.mark.exhaustive
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    making = tmp_path / "making"
    making.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    parent = script(PARENT, tmp_path, str(making), environment=environment)
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
        for number in filter(running, processes):
            os.kill(number, signal.SIGKILL)
