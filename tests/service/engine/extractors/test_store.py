"""The store of extractors, by itself: on folders, and on a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from service.engine.extractors import store as store_module
from service.engine.extractors.objects import DamagedObject, StoreError, kind_and_subject, written_at
from service.engine.extractors.store import Store, Stored
from service.schemas.v1 import ExtractorSpec
from tests.small_disk import small_disk

SPEC = ExtractorSpec(model="resnet18", weights="DEFAULT", return_nodes={"layer4": "C5"})
NODES = {"C5": "layer4.1.relu_1"}
IDS = [f"{number:012x}" for number in range(100)]


def never(id: str) -> bool:
    return False


def put(store: Store, id: str) -> Stored:
    return store.put(id, SPEC, "IMAGENET1K_V1", NODES, "fingerprint")[0]


@pytest.fixture(params=["folder", "folder without hard links", "s3", "memory"])
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


def listed(store: Store) -> list[tuple[Stored, str | None]]:
    return [stored for page in store.pages() for stored in page]


def opened(url: str) -> Store:
    store = Store(url)
    store.open()
    return store


def test_one_writes_and_another_reads(url: str) -> None:
    one, other = opened(url), opened(url)
    assert other.find(IDS[0]) is None
    stored, new = one.put(IDS[0], SPEC, "IMAGENET1K_V1", NODES, "fingerprint")
    assert new
    assert stored.spec == SPEC.model_copy(update={"weights": "IMAGENET1K_V1"})
    assert other.put(IDS[0], SPEC, "IMAGENET1K_V1", NODES, "fingerprint") == (stored, False)
    assert other.find(IDS[0]) == stored
    assert (other.ids(), listed(other)) == ({IDS[0]}, [(stored, None)])

    assert other.claim("r18", stored, never) == IDS[0]
    assert one.find("r18") == stored
    assert listed(one) == [(stored, "r18")]
    second = put(one, IDS[1])
    assert one.claim("r18", second, never) == IDS[0]
    assert one.claim("r18", second, IDS[0].__eq__) == IDS[1]  # what failed gives up its names
    assert other.find("r18") == second
    assert [kind_and_subject(text) for text in other.notices()] == [("name", "r18")]


def test_deleting_frees_names_for_good(url: str) -> None:
    one, other = opened(url), opened(url)
    stored = put(one, IDS[0])
    one.claim("r18", stored, never)
    other.delete(IDS[0])
    one.delete(IDS[0])
    assert one.find(IDS[0]) is one.find("r18") is None
    assert one.ids() == set()
    assert {kind_and_subject(text) for text in one.notices()} == {("extractor", IDS[0])}
    assert all(abs(written_at(text) - time.time()) < 60 for text in one.notices())

    again = put(other, IDS[0])
    assert again.token != stored.token
    assert one.find("r18") is None  # the name was the deleted one's
    assert one.claim("r18", put(one, IDS[1]), never) == IDS[1]
    assert other.claim("r18", again, never) == IDS[1]


def test_concurrent_claims_of_a_name_have_one_winner(url: str) -> None:
    stores = [opened(url) for _ in range(8)]
    stored = [put(store, id) for store, id in zip(stores, IDS, strict=False)]
    dead = put(stores[0], IDS[50])
    stores[0].claim("taken.over", dead, never)
    stores[0].delete(IDS[50])
    with ThreadPoolExecutor(8) as pool:
        for name in ("new", "taken.over"):
            claims = [pool.submit(store.claim, name, one, never) for store, one in zip(stores, stored, strict=True)]
            owners = {claim.result() for claim in claims}
            owner = stores[0].find(name)
            assert owner is not None
            assert owners == {owner.id}


def test_concurrent_creations_of_an_extractor_save_one(url: str) -> None:
    stores = [opened(url) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda s: s.put(IDS[0], SPEC, "IMAGENET1K_V1", NODES, "fingerprint"), stores))
    assert [new for _, new in made].count(True) == 1
    assert len({stored.token for stored, _ in made}) == 1


def _files(url: str) -> tuple[Any, str]:
    return fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"", b'{"version": 2}', b'{"version": 1, "id": "0"}'], ids=lambda data: data.decode()
)
def test_a_damaged_object_harms_no_other(url: str, content: bytes) -> None:
    store = opened(url)
    whole, broken = put(store, IDS[0]), put(store, IDS[1])
    files, root = _files(url)
    files.pipe_file(f"{root}/specs/{IDS[1]}.json", content)
    with pytest.raises(DamagedObject, match=IDS[1]):
        store.find(IDS[1])
    fresh = opened(url)
    assert listed(fresh) == [(whole, None)]
    if b"2" in content:  # a newer version's: not ours to replace
        with pytest.raises(DamagedObject, match="a newer fxserve wrote it"):
            put(store, IDS[1])
    else:
        assert put(store, IDS[1]).token != broken.token
        assert store.find(IDS[1]) is not None


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


def test_old_notices_and_free_names_are_pruned(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(url)
    kept, gone = put(store, IDS[0]), put(store, IDS[1])
    store.claim("kept", kept, never)
    store.claim("gone", gone, never)
    store.delete(IDS[1])
    store.prune()
    assert len(store.notices()) == 1
    monkeypatch.setattr(store_module, "NOTICE_SECONDS", -1.0)
    store.prune()
    assert store.notices() == []
    files, root = _files(url)
    assert [path.rpartition("/names/")[2] for path in files.find(f"{root}/names")] == ["kept/1.json"]
    assert store.find("kept") == kept


def test_notices_stay_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(str(tmp_path))

    def notice(kind: str, subject: str, age: float) -> str:
        name = f"{kind}-{subject}.{(time.time() - age) * 1000:.0f}.0a1b2c3d.json"
        store.objects.create(f"deleted/{name}", {})
        return name

    kept = {notice("extractor", IDS[0], age) for age in (10, 200)} | {notice("name", "r.1", 400)}
    notice("extractor", IDS[0], 400)
    notice("name", "r.1", 500)
    store.prune()
    assert set(store.notices()) == kept
    few = {notice("extractor", id, 600 - place) for place, id in enumerate(IDS[1:9])}
    monkeypatch.setattr(store_module, "MAX_NOTICES", 4)
    store.prune()
    assert kept < set(store.notices())
    assert len(set(store.notices()) & few) == 2


def test_a_full_disk_takes_nothing_away(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = str(disk.path / "store")
        store = opened(url)
        stored = put(store, IDS[0])
        store.claim("r18", stored, never)
        disk.fill()
        later = opened(url)
        assert later.find("r18") == stored
        for change in (
            later.probe,
            lambda: put(later, IDS[1]),
            lambda: later.claim("other", stored, never),
        ):
            with pytest.raises(StoreError, match=r"cannot be written: OSError: .*No space left on device"):
                change()
        assert listed(later) == [(stored, "r18")]
        later.delete(IDS[0])  # which makes room
        assert later.find("r18") is None
        disk.free()
        later.probe()
        assert put(later, IDS[1]).id == IDS[1]
        assert not list((disk.path / "store/parts").iterdir())


@pytest.mark.parametrize("name", ["../specs/x", "..", "/etc/passwd", "a/b", "", "x" * 129, "caf\u00e9", "a\0b"])
def test_what_is_no_name_is_no_path(tmp_path: Path, name: str) -> None:
    assert opened(str(tmp_path)).find(name) is None


def _refused(prepare: Callable[[Path], str], tmp_path: Path) -> str:
    with pytest.raises((StoreError, ValueError)) as caught:
        opened(prepare(tmp_path))
    return str(caught.value)


def test_what_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    assert "Protocol not known: nosuch" in _refused(lambda path: "nosuch://x", tmp_path)
    assert "gcsfs" in _refused(lambda path: "gs://bucket/x", tmp_path)  # not installed here
    assert "no writes that fail where an object exists" in _refused(lambda path: "https://host/x", tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be opened" in _refused(lambda path: str(path / "file"), tmp_path)
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer/store.json").write_text('{"version": 99, "store": "x"}')
    assert "a newer fxserve wrote it (format 99" in _refused(lambda path: str(path / "newer"), tmp_path)


def test_an_unresponsive_store_times_out(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(StoreError, match="cannot be opened"):
        opened(f"{bucket}/x")
    assert time.monotonic() - began < 20


WRITER = """
import sys, time
from tests.service.engine.extractors.test_store import IDS, SPEC, NODES, opened, never
store = opened(sys.argv[1])
for id in IDS:
    stored, new = store.put(id, SPEC, "IMAGENET1K_V1", NODES, "x" * 100000)
    print(id, stored.token, store.claim("name" + id, stored, never), flush=True)
"""


@pytest.mark.exhaustive
def test_a_writer_that_is_killed_leaves_nothing_half(tmp_path: Path) -> None:
    """Four write the same; three are killed on the way. What is there is whole, and the last one completes it."""
    url = str(tmp_path / "store")
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for number, writer in enumerate(writers[:3]):
        assert writer.stdout is not None
        for _ in range(10 * number + 3):
            writer.stdout.readline()
        writer.kill()
    printed = writers[3].communicate(timeout=120)[0].split()
    for writer in writers[:3]:
        writer.communicate()
    assert printed[0::3] == printed[2::3] == IDS
    store = opened(url)
    assert [stored.token for stored, _ in listed(store)] == printed[1::3]
    for path in Path(url).rglob("*.json"):
        assert json.loads(path.read_text())["version"] == 1
