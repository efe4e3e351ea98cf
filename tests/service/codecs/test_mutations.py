"""Damaged bodies of every kind: none ends the process, raises anything but a refusal, or takes long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.forked import Forked


@pytest.mark.exhaustive
def test_mutated_bodies_are_parsed_or_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = Forked([str(Path(__file__).with_name("mutations.py")), "5000", "1"], os.environ, log)
    assert ended.wait(1800) == 0, log.read_text()[-5000:]
