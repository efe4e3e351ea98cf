"""How often the index is uploaded to a bucket."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.offline.folder import Folder
from service.offline.outputs import working_folder


@pytest.mark.parametrize(("seconds", "pause"), [(0.5, 30), (4, 80), (60, 300)])
def test_an_index_that_takes_long_to_upload_is_uploaded_less_often(
    seconds: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, began, put = 0.0, [], Folder.put

    def slow_put(self: Folder, file: Path) -> None:
        nonlocal now
        began.append(now)
        put(self, file)
        now += seconds

    monkeypatch.setattr(working_folder, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Folder, "put", slow_put)
    folder = working_folder.WorkingFolder(Folder(f"memory://out-{pause}"))
    while len(began) < 4:
        folder.publish_index()
        now += 1
    assert 30 <= began[0] < 31
    for last, following in pairwise(began):
        assert pause <= following - (last + seconds) < pause + 1
    folder.close()
    assert len(began) == 5
