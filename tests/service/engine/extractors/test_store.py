"""The store of extractors, by itself: on folders, and on a real S3 server."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from service.engine.extractors.objects import DamagedObject, Objects, StoreError, UnusableObject, Unwritable
from service.engine.extractors.store import Store, Stored
from service.problems import NameTaken, StoreFull
from tests.e2e.forked import script
from tests.service.engine.extractors.shared_store import IDS, extractor, opened
from tests.small_disk import small_disk


def put(store: Store, id: str) -> Stored:
    store.save(extractor(id))
    return extractor(id)


def claim(store: Store, name: str, id: str, failed: str = "") -> str:
    """Name the extractor ``id``; which one has the name then. ``failed`` gives up its names."""
    return store.claim(name, id, {failed})


@pytest.fixture(
    params=[
        "folder",
        "memory",
        *(pytest.param(of, marks=pytest.mark.exhaustive) for of in ("folder without hard links", "s3")),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    if request.param == "memory":
        return f"memory://{tmp_path}"
    if request.param == "folder without hard links":

        def link(*paths: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
    return str(tmp_path / "store")


def test_one_writes_and_another_reads(url: str) -> None:
    one, other, full = opened(url), opened(url), opened(url, limit=0)
    assert other.find(IDS[0]) is None
    with pytest.raises(StoreFull, match="0 extractors"):
        full.save(extractor(IDS[0]))
    assert one.save(extractor(IDS[0])) is True
    assert full.save(extractor(IDS[0])) is False
    with pytest.raises(StoreFull, match="0 names"):
        full.save(extractor(IDS[0]), name="r18")
    assert (other.find(IDS[0]), other.get(IDS[0])) == (IDS[0], extractor(IDS[0]))
    assert other.all() == [(extractor(IDS[0]), None)]

    assert claim(other, "r18", IDS[0]) == IDS[0]
    assert claim(one, "r18", IDS[0]) == IDS[0]
    assert one.find("r18") == IDS[0]
    assert one.all() == [(extractor(IDS[0]), "r18")]
    put(one, IDS[1])
    assert claim(one, "r18", IDS[1]) == IDS[0]
    for name in ("r18", IDS[0]):
        assert one.save(extractor(IDS[0]), name=name) is False
        with pytest.raises(NameTaken, match=IDS[0]):
            other.save(extractor(IDS[1]), name=name)
    assert other.save(extractor(IDS[1]), name="r18", yielding={IDS[0]}) is False
    assert one.all() == [(extractor(IDS[0]), "r18"), (extractor(IDS[1]), None)]
    assert claim(one, "r18", IDS[1], failed=IDS[0]) == IDS[1]
    assert other.find("r18") == IDS[1]
    assert other.all() == [(extractor(IDS[0]), None), (extractor(IDS[1]), "r18")]


def test_what_is_at_its_default_is_not_written(url: str) -> None:
    """So that a version that lacks a field reads the specs that do not use it."""
    put(opened(url), IDS[0])
    files, root = _files(url)
    spec = json.loads(files.cat_file(f"{root}/specs/{IDS[0]}.json"))["spec"]
    assert spec == {
        "model": "resnet18",
        "weights": "IMAGENET1K_V1",
        "return_nodes": {"layer4": "C5"},
        "transforms": ["fold_constants"],
    }


def test_deleting_removes_an_extractor_and_its_names(url: str) -> None:
    one, other = opened(url), opened(url)
    put(one, IDS[0])
    for name in ("r18", "r.18", "r18.json"):
        claim(one, name, IDS[0])
    other.delete(IDS[0])
    one.delete(IDS[0])  # again
    assert one.find(IDS[0]) is one.find("r18") is None
    files, root = _files(url)
    assert [path for path in files.find(root) if "store.json" not in path] == []

    put(other, IDS[0])
    assert one.find("r18") is None  # the name was the deleted one's
    put(one, IDS[1])
    assert claim(one, "r18", IDS[1]) == IDS[1]
    assert claim(other, "r18", IDS[0]) == IDS[1]
    one.delete(IDS[0])
    assert one.find("r18") == IDS[1]


def test_a_name_of_a_deletion_that_did_not_end_is_free(url: str) -> None:
    one, other = opened(url), opened(url)
    put(one, IDS[0])
    claim(one, "r18", IDS[0])
    files, root = _files(url)
    files.rm_file(f"{root}/specs/{IDS[0]}.json")
    assert other.find("r18") is None
    put(other, IDS[1])
    assert claim(other, "r18", IDS[1]) == IDS[1]
    assert one.all() == [(extractor(IDS[1]), "r18")]


def test_a_name_given_during_a_deletion_goes_with_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = opened(url), opened(url)
    put(one, IDS[0])
    create = Objects.create

    def deleted_first(objects: Objects, path: str, content: dict[str, Any]) -> bool:
        if path == "names/r18.json":
            monkeypatch.setattr(Objects, "create", create)
            other.delete(IDS[0])
        return create(objects, path, content)

    monkeypatch.setattr(Objects, "create", deleted_first)
    claim(one, "r18", IDS[0])
    put(one, IDS[0])
    assert other.find("r18") is None


def test_one_that_frees_a_name_late_leaves_its_next_owner(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = opened(url), opened(url)
    for id in IDS[:3]:
        put(one, id)
    claim(one, "r18", IDS[0])
    create = Objects.create

    def slow(objects: Objects, path: str, content: dict[str, Any]) -> bool:
        if path.startswith("marks/free-r18"):
            monkeypatch.setattr(Objects, "create", create)
            assert claim(other, "r18", IDS[1], failed=IDS[0]) == IDS[1]
        return create(objects, path, content)

    monkeypatch.setattr(Objects, "create", slow)
    assert claim(one, "r18", IDS[2], failed=IDS[0]) == IDS[1]
    assert one.find("r18") == IDS[1]


@pytest.mark.exhaustive
def test_a_claim_that_fails_lists_no_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it had the name, or was given it all the same."""
    store = opened(url)
    put(store, IDS[0])
    put(store, IDS[1])
    create = Objects.create
    files, root = _files(url)

    def fails(objects: Objects, path: str, content: dict[str, Any]) -> bool:
        if path == "names/late.json":
            create(objects, path, content)
        if path.startswith("names/"):
            raise Unwritable("cut off")
        return create(objects, path, content)

    claim(store, "r18", IDS[0])
    monkeypatch.setattr(Objects, "create", fails)
    for name in ("new", "late", "r18"):
        with pytest.raises(StoreError, match="cut off"):
            claim(store, name, IDS[0])
    monkeypatch.setattr(Objects, "create", create)
    monkeypatch.setattr(Store, "_free", lambda *args: None)  # another process is at it
    with pytest.raises(StoreError, match="is being freed"):
        claim(store, "r18", IDS[1], failed=IDS[0])
    assert {path.rpartition("/")[2] for path in files.find(f"{root}/named")} == {
        f"{IDS[0]}.late.json",
        f"{IDS[0]}.r18.json",
    }


@pytest.mark.exhaustive
def test_concurrent_claims_of_a_name_have_one_winner(url: str) -> None:
    stores = [opened(url) for _ in range(8)]
    for store, id in zip(stores, IDS, strict=False):
        put(store, id)
    put(stores[0], IDS[50])
    claim(stores[0], "taken.over", IDS[50])
    with ThreadPoolExecutor(8) as pool:
        for name in ("new", "taken.over"):
            claims = [pool.submit(claim, store, name, id, IDS[50]) for store, id in zip(stores, IDS, strict=False)]
            assert {claim.result() for claim in claims} == {stores[0].find(name)}


@pytest.mark.exhaustive
def test_concurrent_creations_of_an_extractor_save_one(url: str) -> None:
    stores = [opened(url) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda store: store.save(extractor(IDS[0])), stores))
    assert made.count(True) == 1


def test_what_was_preloaded_and_deleted_is_known(url: str) -> None:
    one, other = opened(url), opened(url)
    assert not one.was_deleted(IDS[0])
    put(one, IDS[0])
    one.mark_preloaded(IDS[0])
    assert not other.was_deleted(IDS[0])
    other.delete(IDS[0])
    assert one.was_deleted(IDS[0])


def _files(url: str) -> tuple[Any, str]:
    return fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)


@pytest.mark.parametrize("content", [b"{", b"", b'{"version": 1, "id": "0"}'], ids=lambda data: data.decode())
def test_a_damaged_object_harms_no_other(url: str, content: bytes) -> None:
    store = opened(url)
    whole = put(store, IDS[0])
    put(store, IDS[1])
    files, root = _files(url)
    files.pipe_file(f"{root}/specs/{IDS[1]}.json", content)
    with pytest.raises(UnusableObject, match=IDS[1]):
        store.find(IDS[1])
    assert opened(url).all() == [(whole, None)]
    with pytest.raises(StoreFull):
        opened(url, limit=1).save(extractor(IDS[1]))
    with pytest.raises(DamagedObject, match=IDS[1]):  # what is not replaced stays
        store.find(IDS[1])
    assert store.save(extractor(IDS[1])) is True
    assert store.find(IDS[1]) == IDS[1]


def test_what_a_newer_version_wrote_is_not_replaced(url: str) -> None:
    store = opened(url)
    whole = put(store, IDS[0])
    files, root = _files(url)
    for path in (f"specs/{IDS[1]}", "names/mine"):
        files.pipe_file(f"{root}/{path}.json", b'{"version": 3}')
    assert opened(url).all() == [(whole, None)]
    for used in (lambda: store.find(IDS[1]), lambda: put(store, IDS[1]), lambda: claim(store, "mine", IDS[0])):
        with pytest.raises(UnusableObject, match="a newer fxserve wrote it"):
            used()


@pytest.mark.parametrize("kind", ["a folder", "another user's"])
def test_a_file_that_cannot_be_read_harms_no_other(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path)
    whole = put(opened(url), IDS[0])
    foreign = tmp_path / "specs" / f"{IDS[1]}.json"
    if kind == "a folder":
        foreign.mkdir()
    else:
        put(opened(url), IDS[1])
        foreign.chmod(0)
        if os.access(foreign, os.R_OK):
            pytest.skip("root reads every file")
    store = opened(url)
    assert store.all() == [(whole, None)]
    with pytest.raises(StoreError, match=f"cannot be read: .*{IDS[1]}"):
        store.find(IDS[1])


@pytest.mark.parametrize("content", [b"", b'{"version": 2, "id": 3}'])
def test_a_damaged_name_can_be_given_again(url: str, content: bytes) -> None:
    store = opened(url)
    put(store, IDS[0])
    put(store, IDS[1])
    assert claim(store, "mine", IDS[0]) == IDS[0]
    files, root = _files(url)
    files.pipe_file(f"{root}/names/mine.json", content)
    assert store.find("mine") is None
    assert claim(opened(url), "mine", IDS[1]) == IDS[1]
    assert store.find("mine") == IDS[1]


def test_a_store_that_is_gone_is_unavailable_and_not_empty(url: str) -> None:
    store = opened(url)
    put(store, IDS[0])
    files, root = _files(url)
    files.rm(root, recursive=True)
    with pytest.raises(StoreError, match="cannot be read"):
        store.check()
    put(opened(url), IDS[1])
    with pytest.raises(StoreError, match="another store has taken its place"):
        store.check()


def test_a_full_disk_takes_nothing_away(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = str(disk.path / "store")
        store = opened(url)
        stored = put(store, IDS[0])
        claim(store, "r18", IDS[0])
        disk.fill()
        later = opened(url)
        assert later.find("r18") == IDS[0]
        for change in (
            lambda: later.check(write=True),
            lambda: put(later, IDS[1]),
            lambda: claim(later, "other", IDS[0]),
        ):
            with pytest.raises(StoreError, match=r"cannot be written: OSError: .*No space left on device"):
                change()
        assert later.all() == [(stored, "r18")]
        later.delete(IDS[0])  # which makes room
        assert later.find("r18") is None
        disk.free()
        later.check(write=True)
        assert later.save(extractor(IDS[1]))
        assert not list((disk.path / "store/parts").iterdir())


def test_what_writers_that_died_left_goes_after_a_day(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    for name, age in (("old", 25 * 3600), ("new", 23 * 3600)):
        (tmp_path / "parts" / name).write_text("{")
        os.utime(tmp_path / "parts" / name, (time.time() - age,) * 2)
    store.check(write=True)
    assert [part.name for part in (tmp_path / "parts").iterdir()] == ["new"]


def test_one_thread_counts_and_no_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = opened(str(tmp_path), limit=2), opened(str(tmp_path))
    put(other, IDS[0])
    put(other, IDS[1])
    names_in, begun, resume = Objects.names_in, threading.Event(), threading.Event()

    def slow(objects: Objects, folder: str) -> list[str]:
        assert not begun.is_set() or resume.is_set()
        begun.set()
        assert resume.wait(60)
        return names_in(objects, folder)

    monkeypatch.setattr(Objects, "names_in", slow)
    with ThreadPoolExecutor(1) as pool:
        counting = pool.submit(one.save, extractor(IDS[0]), name="r18")
        assert begun.wait(60)
        assert one.save(extractor(IDS[2]))  # of what is known so far
        resume.set()
        assert counting.result() is False
    with pytest.raises(StoreFull, match="3 extractors"):
        one.save(extractor(IDS[3]))


def test_a_count_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise StoreError("cut off")

    store = opened(str(tmp_path), limit=1)
    put(opened(str(tmp_path)), IDS[0])
    with monkeypatch.context() as broken:
        broken.setattr(Objects, "names_in", fail)
        with pytest.raises(StoreError, match="cut off"):
            store.save(extractor(IDS[1]))
    with pytest.raises(StoreFull, match="1 extractor"):
        store.save(extractor(IDS[1]))


@pytest.mark.parametrize("name", ["../specs/x", "..", "/etc/passwd", "a/b", "", "x" * 129, "caf\u00e9", "a\0b"])
def test_what_is_no_name_is_no_path(tmp_path: Path, name: str) -> None:
    assert opened(str(tmp_path)).find(name) is None


def test_what_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    file, newer, older = (tmp_path / name for name in ("file", "newer", "older"))
    file.write_text("")
    newer.mkdir()
    (newer / "store.json").write_text('{"version": 99, "store": "x"}')
    (older / "names/r18").mkdir(parents=True)
    (older / "store.json").write_text('{"version": 1, "store": "x"}')
    before = sorted(older.rglob("*"))
    for url, said in (
        ("nosuch://x", "Protocol not known: nosuch"),
        ("gs://bucket/x", "gcsfs"),  # not installed here
        ("https://host/x", "cannot create an object only if it does not exist"),
        (file, "cannot be read"),
        (newer, r"a newer fxserve wrote it \(format 99"),
        (older, r"written by an older fxserve \(format 1"),
    ):
        with pytest.raises((StoreError, ValueError), match=said):
            opened(str(url))
    assert sorted(older.rglob("*")) == before


@pytest.mark.exhaustive
def test_an_unresponsive_store_times_out(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(StoreError, match="cannot be read"):
        opened(f"{bucket}/x")
    assert time.monotonic() - began < 20


WRITTEN = IDS[:40]

WRITER = """
import sys, time
from tests.service.engine.extractors.shared_store import extractor, opened
from tests.service.engine.extractors.test_store import WRITTEN, claim
store = opened(sys.argv[1])
for id in WRITTEN:
    store.save(extractor(id, "x" * 100000))
    print(id, claim(store, "name" + id, id), flush=True)
"""


@pytest.mark.exhaustive
def test_a_writer_that_is_killed_leaves_nothing_half(tmp_path: Path) -> None:
    """Four write the same; three are killed on the way. What is there is whole, and the last one completes it."""
    url = str(tmp_path / "store")
    writers, outputs = [], []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        os.mkfifo(folder / "stdout")
        writers.append(script(WRITER, folder, url))
        outputs.append((folder / "stdout").open())
    for number, (writer, output) in enumerate(zip(writers[:3], outputs, strict=False)):
        for _ in range(10 * number + 3):
            output.readline()
        writer.kill()
    printed = outputs[3].read().split()
    assert writers[3].wait(120) == 0, (tmp_path / "3/stderr").read_text()
    for writer, output in zip(writers, outputs, strict=True):
        writer.wait(120)
        output.close()
    assert printed[0::2] == printed[1::2] == WRITTEN
    assert opened(url).all() == [(extractor(id, "x" * 100000), f"name{id}") for id in WRITTEN]
    for path in Path(url).rglob("*.json"):
        assert json.loads(path.read_text())["version"] == 2
