"""Two engines over one store, on a folder and on a real S3 server."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from service.engine.extractors import extractors, resolving, sharing
from service.engine.extractors.objects import Objects
from service.engine.extractors.store import Store
from service.problems import Forbidden, NameTaken, NotReady, StoreFull, UnknownExtractor
from tests.service.engine.extractors.shared_store import Held, Pair, away, ids
from tests.service.engine.running import PATIENCE, MakeEngine, built, spec, tensors, until
from tests.small_disk import small_disk

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patience")]


async def test_what_one_process_makes_another_builds_once(
    engine: MakeEngine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = []
    resolve = resolving.resolve

    def counting(*args: object) -> object:
        resolved.append(args)
        return resolve(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(resolving, "resolve", counting)
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        record, created = await one.extractors.get(spec(name="r"), PATIENCE, keep=True)
        assert created
        resolved.clear()
        asked = [record.id, "r"] * 8
        found = await asyncio.gather(*(other.extractors.look_up(name) for name in asked))
        assert {id(one) for one in found} == {id(found[0])}
        assert len(resolved) == 1
        assert (found[0].id, found[0].name) == (record.id, "r")
        expected = await one.features(record, tensors(1))
        given = await other.features(found[0], tensors(1))
        for key, value in expected.outputs.items():
            assert value.equal(given.outputs[key])
        again, created = await other.extractors.get(spec(name="again"), PATIENCE, keep=True)
        assert (again, created) == (found[0], False)
        assert await one.extractors.look_up("again") is record

        with pytest.raises(NameTaken):
            await other.extractors.get(spec("resnet18", ["layer4"], name="r"), keep=True)
        assert ids(url) == {record.id}
        with pytest.raises(Forbidden):  # a key of scope read makes nothing
            await other.extractors.get(spec("resnet18", ["layer4"]), build=False)


async def test_what_is_deleted_comes_back_by_a_user_only(engine: MakeEngine, url: str, later: None) -> None:
    preload = "mobilenet_v3_small@random:features.8"
    async with engine(extractors=url, preload=preload) as one, engine(extractors=url, preload=preload) as other:
        await until(lambda: one.readiness()[0] and other.readiness()[0])
        [record] = one.records.list()
        await one.extractors.delete(record.id)
        with pytest.raises(UnknownExtractor):
            await other.extractors.look_up(record.id)
        assert other.records.list() == []
        async with engine(extractors=url, preload=preload) as later:  # takes the place of one that died
            await until(lambda: later.readiness()[0])
            assert later.records.list() == []
            with pytest.raises(UnknownExtractor):
                await later.extractors.look_up(record.id)
            await built(later, "mobilenet_v3_small", nodes=["features.8"])
            assert (await one.extractors.look_up(record.id)).id == record.id
            # The other makes it again before it knows of the deletion.
            await later.extractors.delete(record.id)
            _, created = await one.extractors.get(
                spec("mobilenet_v3_small", nodes=["features.8"], name="anew"), keep=True
            )
            assert created
            assert (await later.extractors.look_up("anew")).id == record.id
            assert await one.extractors.known("anew") is not None


async def test_extractors_of_models_not_served_here_are_unknown(engine: MakeEngine, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one, engine(extractors=url, models=("resnet18",)) as other:
        record, _ = await one.extractors.get(spec(name="mine"), PATIENCE, keep=True)
        assert await other.extractors.elsewhere() == []
        for name in ("mine", record.id):
            with pytest.raises(UnknownExtractor):
                await other.extractors.look_up(name)
        await other.extractors.delete("mine")
        assert ids(url) == set()


async def test_a_deletion_is_seen_by_whatever_uses_it(pair: Pair, tmp_path: Path, later: None) -> None:
    one, other = pair
    for n in range(5):
        await one.extractors.get(spec(nodes=[f"features.{n}"], name=f"n{n}"), PATIENCE, keep=True)
    records = [await other.extractors.look_up(f"n{n}") for n in range(5)]
    await asyncio.gather(*(other.runtimes.load(record) for record in records))
    for record in records:
        await one.extractors.delete(record.id)
    assert len(other.records.list()) == 5  # nothing was used since
    assert await other.extractors.known("n0") is None
    assert await other.extractors.namesake("n1") is None
    with pytest.raises(UnknownExtractor):
        await other.extractors.delete("n2")
    with pytest.raises(Forbidden):
        await other.extractors.get(spec(nodes=["features.3"]), build=False)
    assert other.records.list() == records[4:]
    again, created = await other.extractors.get(spec(nodes=["features.4"]))  # in one step
    assert (created, again.name, again is records[4]) == (True, None, True)
    assert await other.extractors.elsewhere() == []
    assert other.records.list() == [again]
    assert ids(str(tmp_path / "store")) == {again.id}


async def test_a_name_that_another_process_gives_is_listed(
    engine: MakeEngine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look-up of each name: thousands of them would keep all other operations of the store waiting."""
    find, read = Store.find, []
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        record, _ = await one.extractors.get(spec(), PATIENCE, keep=True)
        assert record.name is None
        await other.extractors.get(spec(name="r"), PATIENCE, keep=True)
        monkeypatch.setattr(Store, "find", lambda store, key: read.append(key) or find(store, key))
        assert await one.extractors.elsewhere() == []
        assert [(listed.id, listed.name) for listed in one.records.list()] == [(record.id, "r")]
        assert read == []
        assert one.records.known("r") is record


async def test_a_name_that_another_extractor_has_is_not_listed(pair: Pair, tmp_path: Path, later: None) -> None:
    """A process that dies while it gives a name leaves it in the index of the names of its extractor."""
    one, other = pair
    record, _ = await one.extractors.get(spec(), PATIENCE, keep=True)
    owner, _ = await other.extractors.get(spec("resnet18", ["layer4"], name="r"), PATIENCE, keep=True)
    Objects(str(tmp_path / "store")).create(f"named/{record.id}.r.json", {})
    assert [name for _, name in await one.extractors.elsewhere()] == ["r"]
    assert record.name is None
    assert (await one.extractors.look_up("r")).id == owner.id
    assert record.name is None


async def test_the_store_is_read_no_more_often_than_it_must(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by several requests at a time, nor on the event loop."""
    monkeypatch.setattr(extractors, "CHECK_SECONDS", PATIENCE)
    url, find, read = str(tmp_path / "store"), Store.find, []

    def counted(store: Store, key: str) -> str | None:
        read.append(threading.current_thread().name)
        return find(store, key)

    async with engine(extractors=url) as one:
        record, _ = await one.extractors.get(spec(name="r"), PATIENCE, keep=True)
        monkeypatch.setattr(Store, "find", counted)
        for key in (record.id, "r"):
            read.clear()
            for _ in range(2):
                await asyncio.gather(*(one.extractors.look_up(key) for _ in range(8)))
                await one.extractors.known(key)
                await one.extractors.get(spec())
            assert [name.rpartition("_")[0] for name in read] == ["fxserve-store"]


async def test_an_extractor_is_found_as_soon_as_it_is_made(engine: MakeEngine, url: str) -> None:
    """Though a look-up just before found none."""
    async with engine(extractors=url) as one, engine(extractors=url) as other:

        async def ask() -> None:
            with pytest.raises(UnknownExtractor):
                await other.extractors.look_up("r")

        await ask()
        await asyncio.gather(*(ask() for _ in range(4)))
        record, _ = await one.extractors.get(spec(name="r"), keep=True)
        assert (await other.extractors.look_up("r")).id == record.id


@pytest.mark.exhaustive
async def test_what_was_made_without_the_store_is_saved_when_it_is_asked_for_again(
    pair: Pair, tmp_path: Path, later: None
) -> None:
    one, other = pair
    await until(lambda: one.readiness() == (True, "ready"))
    with away(tmp_path):
        await until(lambda: one.readiness()[1] != "ready")
        record = await built(one)
        with pytest.raises(NotReady, match=r"store\.json is missing"):
            await other.extractors.look_up(record.id)
        with pytest.raises(NotReady):
            await one.extractors.get(spec(name="r"), keep=True)
        assert await one.extractors.look_up(record.id) is record
    await until(lambda: one.readiness()[1] == other.readiness()[1] == "ready")
    assert await one.extractors.look_up(record.id) is record
    assert await one.extractors.get(spec()) == (record, True)
    assert (await other.extractors.look_up(record.id)).id == record.id


async def test_a_deletion_in_a_store_that_has_just_gone_is_refused(engine: MakeEngine, tmp_path: Path) -> None:
    """Or the extractor would come back with it."""
    async with engine(extractors=str(tmp_path / "store")) as one:
        record = await built(one)
        with away(tmp_path), pytest.raises(NotReady, match=r"store\.json is missing"):
            await one.extractors.delete(record.id)
        assert one.records.known(record.id) is record


@pytest.mark.exhaustive
async def test_a_reader_is_told_to_wait_for_a_store_that_is_away(pair: Pair, tmp_path: Path, later: None) -> None:
    """Another process may have made the extractor: whether the reader may use it is not known."""
    one, other = pair
    id = (await built(one)).id
    with away(tmp_path):
        with pytest.raises(NotReady, match=r"store\.json is missing"):
            await other.extractors.get(spec(), build=False)
        await until(lambda: other.readiness()[1] != "ready")
    await until(lambda: other.readiness()[1] == "ready")
    assert (await other.extractors.get(spec(), build=False))[0].id == id


async def test_a_deletion_is_refused_while_a_save_is_pending(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has taken too long cannot be stopped: what it saves would come after the deletion."""
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one:
        slow = Held(monkeypatch, Store, "save")
        monkeypatch.setattr(sharing, "TIMEOUT_SECONDS", 0.3)
        record = await built(one)  # without the store
        assert not record.saved
        with pytest.raises(NotReady):
            await one.extractors.delete(record.id)
        assert one.records.known(record.id) is record
        monkeypatch.setattr(sharing, "TIMEOUT_SECONDS", PATIENCE)
        deletion = asyncio.create_task(one.extractors.delete(record.id))
        await asyncio.sleep(0.1)
        assert not deletion.done()
        slow.resume.set()
        await deletion
        assert ids(url) == set()
        with pytest.raises(UnknownExtractor):
            await one.extractors.look_up(record.id)


async def test_what_is_written_waits_for_the_same_extractor_only(engine: MakeEngine, tmp_path: Path) -> None:
    async with engine(extractors=str(tmp_path / "store")) as one:
        gate, done = threading.Event(), []
        write = one._sharing.write
        slow = [asyncio.create_task(write("a", lambda: done.append(gate.wait(PATIENCE)))) for _ in range(8)]
        await asyncio.gather(*(write(f"{number:012x}", lambda: None) for number in range(32)))
        assert done == []
        gate.set()
        await asyncio.gather(*slow)
        assert done == [True] * 8


async def test_what_the_store_has_is_not_written_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    record, _ = await one.extractors.get(spec(), PATIENCE, keep=True)
    monkeypatch.setattr(Objects, "create", None)
    again, created = await other.extractors.get(spec(), keep=True)
    assert (again.id, created) == (record.id, False)


@pytest.mark.exhaustive
async def test_a_full_disk_is_served_from_and_written_later(engine: MakeEngine, tmp_path: Path, later: None) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = str(disk.path / "store")
        async with engine(extractors=url) as before:
            known, _ = await before.extractors.get(spec(name="r"), PATIENCE, keep=True)
        disk.fill()
        async with engine(extractors=url) as one:
            await until(lambda: "No space left on device" in one.readiness()[1])
            assert one.readiness()[0]
            assert (await one.extractors.look_up("r")).id == known.id
            with pytest.raises(NotReady, match="No space left on device"):
                await one.extractors.get(spec(nodes=["features.8"], name="other"), keep=True)
            record = await built(one, nodes=["features.8"])
            assert not record.saved
            disk.free()
            await until(lambda: one.readiness() == (True, "ready"))
            await built(one, nodes=["features.8"])
            assert ids(url) == {known.id, record.id}


@pytest.mark.parametrize("by_name", [True, False])
async def test_a_damaged_extractor_can_be_deleted(engine: MakeEngine, tmp_path: Path, by_name: bool) -> None:
    url = str(tmp_path)
    async with engine(extractors=url) as one:
        record, _ = await one.extractors.get(spec(name="r"), PATIENCE, keep=True)
    (tmp_path / "specs" / f"{record.id}.json").write_bytes(b"\x00damaged")
    async with engine(extractors=url) as other:
        asked = "r" if by_name else record.id
        with pytest.raises(NotReady, match="cannot be used"):
            await other.extractors.look_up(asked)
        await other.extractors.delete(asked)
        with pytest.raises(UnknownExtractor):
            await other.extractors.look_up(asked)
        with pytest.raises(UnknownExtractor):
            await other.extractors.delete(asked)
    assert not [*tmp_path.glob("specs/*"), *tmp_path.glob("names/*"), *tmp_path.glob("named/*")]


async def test_a_store_that_was_repaired_is_not_called_damaged(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_DAMAGE_SECONDS", 2 * PATIENCE)
    Store(str(tmp_path)).check()
    mark = tmp_path / "store.json"
    whole = mark.read_text()
    mark.write_text("{")
    async with engine(extractors=str(tmp_path)) as one:
        mark.write_text(whole)
        await until(lambda: one.readiness() == (True, "ready"))


async def test_a_full_store_loses_nothing(engine: MakeEngine, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    async with engine(extractors=url, max_stored_extractors=3) as one:
        by_the_way = [await built(one, nodes=[f"features.{number}"]) for number in (2, 3)]
        assert [record.saved for record in by_the_way] == [True, False]
        asked_for = [
            (await one.extractors.get(spec(nodes=[f"features.{number}"], name=f"n{number}"), keep=True))[0]
            for number in (4, 5)
        ]
        with pytest.raises(StoreFull, match="the store has 3 extractors and the limit is 3; delete"):
            await one.extractors.get(spec(nodes=["features.6"]), keep=True)
        assert await one.extractors.get(spec(nodes=["features.4"], name="again"), keep=True) == (asked_for[0], False)
        stored = {record.id for record in (by_the_way[0], *asked_for)}
        assert ids(url) == stored
        async with engine(extractors=url, max_stored_extractors=3) as other:
            with pytest.raises(StoreFull):
                await other.extractors.get(spec(nodes=["features.6"]), keep=True)
        await one.extractors.delete("n5")
        assert (await one.extractors.get(spec(nodes=["features.6"]), keep=True))[1]
