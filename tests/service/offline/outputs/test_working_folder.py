"""When the index is uploaded to a bucket."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from service.offline.folder import Folder
from service.offline.inputs.sources import Source
from service.offline.outputs import working_folder
from service.offline.outputs.shards import FORMATS


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


def test_the_index_of_a_killed_run_does_not_refer_to_shards_that_were_written_anew() -> None:
    """A shard that somebody deleted is computed again, perhaps from other images, as more may have come."""
    out = Folder("memory://killed")
    row = {"mid": torch.zeros(1, 2)}

    def write(folder: working_folder.WorkingFolder, path: str) -> None:
        FORMATS["safetensors"].write(folder.path / "shard-000000.safetensors", row, [path], {})
        folder.publish("shard-000000.safetensors")
        folder.commit("shard-000000.safetensors", [path], [])

    first = working_folder.WorkingFolder(out)
    first.index.add([Source("b.png", "b.png")])
    write(first, "b.png")
    first.close()
    out.remove("shard-000000.safetensors")

    killed = working_folder.WorkingFolder(out)
    killed.match_shards(".safetensors")
    killed.index.add([Source("a.png", "a.png"), Source("b.png", "b.png")])
    write(killed, "a.png")
    killed.index.close()  # and nothing is uploaded

    resumed = working_folder.WorkingFolder(out)
    resumed.match_shards(".safetensors")
    assert resumed.index.finished(["a.png", "b.png"]) == set()
    assert resumed.index.shards() == []
    resumed.close()
    assert "shard-000000.safetensors" not in out.names()
