"""The folder of several server processes, and those of servers that were killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from service.http.server.shared_folder import shared_folder


def test_a_folder_of_another_user_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe would wait for ever."""
    other = tmp_path / "fxserve-processes-other"
    other.mkdir()
    os.mkfifo(other / "lock")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: other.stat().st_uid + 1)
    child = os.fork()
    if not child:
        signal.alarm(10)
        try:
            with shared_folder():
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert other.exists()


def test_folders_of_killed_servers_are_removed_and_of_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "fxserve-processes-new").mkdir()  # not locked yet
    (tmp_path / "fxserve-other").mkdir()
    others = set(tmp_path.iterdir())
    child = os.fork()
    if not child:
        try:
            with shared_folder() as folder:
                (folder / "weights").write_bytes(b"many")
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    [left] = set(tmp_path.iterdir()) - others
    with shared_folder() as first, shared_folder() as second:
        assert set(tmp_path.iterdir()) == {*others, first, second}
        assert left not in (first, second)
    assert set(tmp_path.iterdir()) == others
