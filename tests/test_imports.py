"""The direction of imports: contracts in pyproject.toml, imports for type checkers included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_imports_run_one_way_and_in_no_circle() -> None:
    # In a process of its own: it disables all loggers that there are, and other tests read what is logged.
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
