"""The folder of several server processes, and those of servers that were killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from service.http.server.shared_folder import shared_folder


def test_folders_of_killed_servers_are_removed_and_of_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "fxserve-processes-new").mkdir()  # not locked yet
    (tmp_path / "fxserve-other").mkdir()
    others = set(tmp_path.iterdir())
    child = os.fork()
    if not child:
        with shared_folder() as folder:
            (folder / "weights").write_bytes(b"many")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    [left] = set(tmp_path.iterdir()) - others
    with shared_folder() as first, shared_folder() as second:
        assert set(tmp_path.iterdir()) == {*others, first, second}
        assert left not in (first, second)
    assert set(tmp_path.iterdir()) == others
