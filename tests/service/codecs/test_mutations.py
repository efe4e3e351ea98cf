"""Damaged bodies of every kind: none ends the process, raises anything but a refusal, or takes long."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.exhaustive
def test_mutated_bodies_are_parsed_or_refused() -> None:
    command = [sys.executable, "-m", "tests.service.codecs.mutations", "5000", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
