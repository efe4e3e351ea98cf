"""A quarter of a minute of benchmarks/soak.py: mixed models, sizes, errors and clients that leave; nothing may grow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent.parent / "benchmarks/soak.py"


@pytest.mark.exhaustive
def test_nothing_grows() -> None:
    command = [sys.executable, str(SOAK), "--small", "--seconds", "15", "--clients", "4"]
    environment = os.environ | {"FXSERVE_DEVICE": "cpu", "TORCH_HOME": "/nonexistent"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
