"""When the index is uploaded to a bucket, and which shards stay in it."""

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


def put_shard(folder: working_folder.WorkingFolder, name: str, path: str) -> None:
    """Write a shard of one row."""
    chosen = FORMATS[Path(name).suffix[1:]]
    chosen.write(folder.path / name, {"mid": torch.zeros(1, 2)}, [path], {})
    folder.commit(name, [path], [], size=folder.publish(name))


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

    first = working_folder.WorkingFolder(out)
    first.index.add([Source("b.png", "b.png")])
    put_shard(first, "shard-000000.safetensors", "b.png")
    first.close()
    out.remove("shard-000000.safetensors")

    killed = working_folder.WorkingFolder(out)
    killed.match_shards(".safetensors")
    killed.index.add([Source("a.png", "a.png"), Source("b.png", "b.png")])
    put_shard(killed, "shard-000000.safetensors", "a.png")
    killed.index.close()  # and nothing is uploaded

    resumed = working_folder.WorkingFolder(out)
    resumed.match_shards(".safetensors")
    assert resumed.index.finished(["a.png", "b.png"]) == set()
    assert resumed.index.shards() == []
    resumed.close()
    assert "shard-000000.safetensors" not in out.names()


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize("suffix", ["npz", "zarr"])
def test_a_shard_that_was_cut_is_computed_again(
    suffix: str, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = Folder(tmp_path if place == "disk" else f"memory://cut-{suffix}")
    names = [f"shard-00000{number}.{suffix}" for number in range(2)]
    first = working_folder.WorkingFolder(out)
    first.index.add([Source(name, name) for name in names])
    for name in names:
        put_shard(first, name, name)
    first.close()
    cut = max(out.fs.find(out.path(names[1])))  # a file, or the last one of a folder
    out.fs.pipe_file(cut, out.fs.cat_file(cut)[:-1])

    resumed = working_folder.WorkingFolder(out)
    resumed.match_shards(f".{suffix}")
    assert resumed.index.finished(names) == {names[0]}
    resumed.close()
    assert [name for name in out.names() if name in names] == names[:1]
    assert [record.getMessage() for record in caplog.records] == [
        f"{out}/{names[1]} was changed since it was written; its images are computed again"
    ]
