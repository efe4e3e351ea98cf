"""Exports without a child process, which imports torch and more for seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxcore.backends import process
from fxcore.exports import CannotExport, export_child


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child process of an export does is done here; ``tests/fxcore/test_create_extractor.py`` has it."""

    def run(program: str, folder: Path, *rest: Any) -> None:
        assert program == export_child.__name__
        try:
            export_child.work(folder)
        except CannotExport as error:
            raise process.ProcessFailed(f"failed: {error}") from error

    monkeypatch.setattr(process, "run", run)
