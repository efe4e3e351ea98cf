"""What importing our packages changes in a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


def run(code: str, **variables: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=ENVIRONMENT | variables, check=True, capture_output=True, text=True, timeout=300
    ).stdout


@pytest.mark.exhaustive
def test_the_environment_of_programs_that_use_ours_stays() -> None:
    code = "import os; before = dict(os.environ); import fxcore, service.client; print(dict(os.environ) == before)"
    assert run(code) == "True\n"


WATCH = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
sys.argv = ["fxserve", "models"]
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", ["import service.app", "from service.cli import main; main()"])
def test_idle_openmp_threads_of_a_server_sleep(start: str) -> None:
    """The variable is set when torch is loaded; one that is set already stays."""
    assert run(WATCH + start) == "PASSIVE\n"
    assert run(WATCH + start, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE\n"
