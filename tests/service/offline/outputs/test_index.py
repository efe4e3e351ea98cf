"""The index on the disk: what is left, what counts, and whose it is."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fxcore.errors import FxError
from service.offline.inputs.sources import Source
from service.offline.outputs.index import Index


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with closing(Index(tmp_path)) as made:
        yield made


def left(index: Index) -> list[str]:
    return [source.path for block in index.pending() for source in block]


def files(*names: str) -> list[Source]:
    return [Source(name, name) for name in names]


def test_what_is_entered_is_left_until_it_is_in_a_shard(index: Index, tmp_path: Path) -> None:
    index.add(files("b", "c", "a", "b"))
    assert left(index) == ["a", "b", "c"]
    index.commit("shard-000000.npz", ["b"], [("c", "it is no image")])
    index.close()
    with closing(Index(tmp_path)) as again:
        assert (left(again), again.counts(), list(again.errors())) == (["a"], (3, 1, 1), [("c", "it is no image")])
        again.add(files("c", "d", "b"))  # a is gone now, d is new, and c may have been mended
        assert (left(again), again.counts()) == (["c", "d"], (3, 1, 0))


def test_shards_that_are_gone_are_done_again(index: Index) -> None:
    index.add(files("a", "b", "c"))
    index.commit("shard-000000.npz", ["a", "b"], [])
    index.commit("shard-000001.npz", ["c"], [])
    index.keep_shards({"shard-000001.npz": 1})
    assert (left(index), index.shards()) == (["a", "b"], ["shard-000001.npz"])


def test_shards_of_another_size_are_done_again(index: Index) -> None:
    index.add(files("a", "b", "c"))
    index.commit("shard-000000.npz", ["a"], [], size=10)
    index.commit("shard-000001.npz", ["b"], [], size=10)
    index.commit("shard-000002.npz", ["c"], [])  # by an older fxserve
    sizes = {"shard-000000.npz": 10, "shard-000001.npz": 9, "shard-000002.npz": 9}
    assert index.keep_shards(sizes) == ["shard-000001.npz"]
    assert left(index) == ["b"]
    index.commit("shard-000001.npz", ["b"], [])
    assert index.keep_shards(sizes) == []


def test_members_of_an_archive_are_left_in_the_order_of_their_places(index: Index) -> None:
    members = [Source(f"t.tar/{name}", "t.tar", offset, 5) for offset, name in ((30, "a"), (10, "c"), (20, "b"))]
    index.add([*members, Source("t.tar/a", "t.tar", 40, 6)])  # a once more: tar takes the last
    assert left(index) == ["t.tar/c", "t.tar/b", "t.tar/a"]
    assert [source.offset for block in index.pending() for source in block] == [10, 20, 40]


def test_many_are_given_in_blocks_and_each_once(index: Index) -> None:
    index.add(files(*(f"{n:05d}" for n in range(3000))))
    blocks = [[source.path for source in block] for block in index.pending()]
    assert [path for block in blocks for path in block] == [f"{n:05d}" for n in range(3000)]
    assert max(map(len, blocks)) < 2000


def test_links_to_the_last_of_a_block_are_given(index: Index) -> None:
    """They have its place in the archive."""
    members = [Source(f"t.tar/{n:05d}", "t.tar", n, 5) for n in range(3000)]
    index.add([*members, *(Source(f"{one.path}-link", "t.tar", one.offset, 5) for one in members[1:])])
    assert left(index) == ["t.tar/00000", *(f"t.tar/{n:05d}{link}" for n in range(1, 3000) for link in ("", "-link"))]


@pytest.mark.parametrize("read_only", [False, True])
def test_two_runs_cannot_have_one_folder(read_only: bool, index: Index, tmp_path: Path) -> None:
    with pytest.raises(FxError, match="another run is writing to this folder"):
        Index(tmp_path, read_only=read_only)
    index.close()
    Index(tmp_path, read_only=read_only).close()


def test_a_damaged_index_is_reported(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(FxError, match="is damaged"):
        Index(tmp_path)


def test_an_index_is_read_without_being_written(index: Index, tmp_path: Path) -> None:
    index.add(files("a"))
    index.close()
    before = (tmp_path / "index.sqlite").stat()
    with closing(Index(tmp_path, read_only=True)) as other:
        assert other.counts() == (1, 0, 0)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            other.add(files("b"))
    after = (tmp_path / "index.sqlite").stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


def test_an_index_that_a_killed_run_left_in_a_transaction_is_not_read(index: Index, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    index.add(files(*(f"{n:05d}" for n in range(3000))))
    index.close()
    killed.mkdir()
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 1")  # so that it writes pages before the end
        database.execute("BEGIN")
        database.execute("UPDATE images SET error = 'broken'")
        for name in ("index.sqlite", "index.sqlite-journal"):
            shutil.copy(tmp_path / name, killed)
        database.execute("ROLLBACK")
    with pytest.raises(FxError, match=r"killed/index.sqlite cannot be read \(.*\); finish that run first"):
        Index(killed, read_only=True)
    with closing(Index(killed)) as resumed:
        assert resumed.counts() == (3000, 0, 0)
