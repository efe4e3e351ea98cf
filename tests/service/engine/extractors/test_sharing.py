"""Two engines over one store, on a folder and on a real S3 server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fxcore.errors import UnknownWeights
from service.engine.extractors import extractors, resolving, sharing, store
from service.engine.extractors.store import Store, Stored
from service.problems import Forbidden, NameTaken, NotReady, StoreFull, UnknownExtractor
from tests.service.engine.running import PATIENCE, MakeEngine, built, spec, tensors, until
from tests.small_disk import small_disk

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy disk may take seconds for what takes none."""
    monkeypatch.setattr(sharing, "TIMEOUT_SECONDS", PATIENCE)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was read is relied on, as two seconds later."""
    monkeypatch.setattr(extractors, "CHECK_SECONDS", 0.0)


def ids(url: str) -> set[str]:
    return {stored.id for page in Store(url).pages() for stored, _ in page}


class Held:
    """Stands where a function of ``owner`` stands, and holds one call of it until the test lets it go on.

    Args:
        call: which one is held, counted from 0 among those whose arguments ``held`` is true of.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        held: Callable[..., bool] = lambda *args: True,
        call: int = 0,
    ) -> None:
        self.begun, self.resume = threading.Event(), threading.Event()
        function, calls = getattr(owner, name), count()

        def hold(*args: Any) -> Any:
            if held(*args) and next(calls) == call:
                self.begun.set()
                assert self.resume.wait(PATIENCE)
            return function(*args)

        monkeypatch.setattr(owner, name, hold)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.exhaustive)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    return str(tmp_path / "store")


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
        record, created = await one.extractor(spec(name="r"), PATIENCE, keep=True)
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
        again, created = await other.extractor(spec(name="again"), PATIENCE, keep=True)
        assert (again, created) == (found[0], False)
        assert await one.extractors.look_up("again") is record

        with pytest.raises(NameTaken):
            await other.extractor(spec("resnet18", ["layer4"], name="r"), keep=True)
        assert ids(url) == {record.id}
        with pytest.raises(Forbidden):  # a key of scope read makes nothing
            await other.extractor(spec("resnet18", ["layer4"]), build=False)


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
            await built(later, nodes=["features.8"])
            assert (await one.extractors.look_up(record.id)).id == record.id
            # The other makes it again before it knows of the deletion.
            await later.extractors.delete(record.id)
            _, created = await one.extractor(spec(nodes=["features.8"], name="anew"), keep=True)
            assert created
            assert (await later.extractors.look_up("anew")).id == record.id
            assert await one.extractors.known("anew") is not None


async def test_a_deletion_is_seen_by_whatever_uses_it(engine: MakeEngine, tmp_path: Path, later: None) -> None:
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        made = [await one.extractor(spec(nodes=[f"features.{n}"], name=f"n{n}"), PATIENCE, keep=True) for n in range(5)]
        records = [await other.extractors.look_up(f"n{n}") for n in range(5)]
        used = [other.runtimes.load(record) for record in records]
        await asyncio.gather(*used)
        for record, _ in made:
            await one.extractors.delete(record.id)
        assert len(other.records.list()) == 5  # nothing was used since
        assert await other.extractors.known("n0") is None
        assert await other.extractors.namesake("n1") is None
        with pytest.raises(UnknownExtractor):
            await other.extractors.delete("n2")
        with pytest.raises(Forbidden):
            await other.extractor(spec(nodes=["features.3"]), build=False)
        assert [record.id for record in other.records.list()] == [made[4][0].id]
        again, created = await other.extractor(spec(nodes=["features.4"]))  # in one step
        assert (created, again.name, again is records[4]) == (True, None, True)
        assert await other.extractors.elsewhere() == []
        assert other.records.list() == [again]
        assert ids(url) == {again.id}


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
        record, _ = await one.extractor(spec(name="r"), PATIENCE, keep=True)
        monkeypatch.setattr(Store, "find", counted)
        for key in (record.id, "r"):
            read.clear()
            for _ in range(2):
                await asyncio.gather(*(one.extractors.look_up(key) for _ in range(8)))
                await one.extractors.known(key)
                await one.extractor(spec())
            assert [name.rpartition("_")[0] for name in read] == ["fxserve-store"]


async def test_an_extractor_is_found_as_soon_as_it_is_made(engine: MakeEngine, url: str) -> None:
    """Though a look-up just before found none."""
    async with engine(extractors=url) as one, engine(extractors=url) as other:

        async def ask() -> None:
            with pytest.raises(UnknownExtractor):
                await other.extractors.look_up("r")

        await ask()
        before = asyncio.gather(*(ask() for _ in range(4)))
        await before
        record, _ = await one.extractor(spec(name="r"), keep=True)
        assert (await other.extractors.look_up("r")).id == record.id


async def test_what_was_made_without_the_store_is_saved_when_it_is_asked_for_again(
    engine: MakeEngine, tmp_path: Path, later: None
) -> None:
    folder, aside = tmp_path / "store", tmp_path / "aside"
    async with engine(extractors=str(folder)) as one, engine(extractors=str(folder)) as other:
        await until(lambda: one.readiness() == (True, "ready"))
        folder.rename(aside)
        await until(lambda: one.readiness()[1] != "ready")
        record = await built(one)
        with pytest.raises(NotReady, match=r"store\.json is missing"):
            await other.extractors.look_up(record.id)
        with pytest.raises(NotReady):
            await one.extractor(spec(name="r"), keep=True)
        assert await one.extractors.look_up(record.id) is record
        aside.rename(folder)
        await until(lambda: one.readiness()[1] == other.readiness()[1] == "ready")
        assert await one.extractors.look_up(record.id) is record
        assert await one.extractor(spec()) == (record, True)
        assert (await other.extractors.look_up(record.id)).id == record.id


async def test_a_name_that_moves_while_another_process_looks_it_up(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds later it names the extractor that the store says, though the one that had it exists again."""
    url = str(tmp_path / "store")
    resolve = resolving.resolve
    begun, resume = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        if not begun.is_set():
            begun.set()
            assert resume.wait(PATIENCE)
        return resolve(*args)

    async with engine(extractors=url) as one, engine(extractors=url) as other:
        first, _ = await one.extractor(spec(name="x"), PATIENCE, keep=True)
        monkeypatch.setattr(resolving, "resolve", slow)
        looking = asyncio.create_task(other.extractors.look_up("x"))
        await until(begun.is_set)
        await one.extractors.delete(first.id)
        again, _ = await one.extractor(spec(), PATIENCE, keep=True)
        second, _ = await one.extractor(spec(nodes=["features.3"], name="x"), PATIENCE, keep=True)
        resume.set()
        await looking
        assert again.id == first.id
        monkeypatch.setattr(extractors, "CHECK_SECONDS", 0.0)
        assert (await other.extractors.look_up("x")).id == second.id


async def test_an_adoption_goes_on_when_its_request_leaves(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        record, _ = await one.extractor(spec(), PATIENCE, keep=True)
        held = Held(monkeypatch, resolving, "resolve")
        looking = asyncio.create_task(other.extractors.look_up(record.id))
        await until(held.begun.is_set)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        held.resume.set()
        await until(lambda: other.records.get(record.id) is not None)


async def test_what_cannot_be_adopted_is_resolved_once_for_all_who_wait(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        record, _ = await one.extractor(spec(), PATIENCE, keep=True)
        assert other._sharing is not None
        find, found, resume, resolved = other._sharing.find, [], threading.Event(), []

        async def noted(*args: Any) -> str | None:
            found.append(await find(*args))
            return found[-1]

        def fail(*args: object) -> None:
            resolved.append(args)
            assert resume.wait(PATIENCE)
            raise UnknownWeights("these weights are on another machine")

        monkeypatch.setattr(other._sharing, "find", noted)
        monkeypatch.setattr(resolving, "resolve", fail)
        looking = [asyncio.create_task(other.extractors.look_up(record.id)) for _ in range(8)]
        await until(lambda: len(found) == len(looking))
        resume.set()
        said = await asyncio.gather(*looking, return_exceptions=True)
        assert [type(each) for each in said] == [NotReady] * 8
        assert len(resolved) == 1


async def test_what_is_deleted_while_it_is_adopted_stays_deleted(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a request for its nodes made it known first."""
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        record, _ = await one.extractor(spec(name="x"), PATIENCE, keep=True)
        read = Held(monkeypatch, Store, "get", call=1)  # the first call finds that there is one
        named = Held(monkeypatch, Store, "find", lambda store, key: key == "x")
        looking = asyncio.create_task(other.extractors.look_up(record.id))
        await until(read.begun.is_set)
        await built(other)
        read.resume.set()
        await until(named.begun.is_set)
        await other.extractors.delete(record.id)
        named.resume.set()
        with pytest.raises(UnknownExtractor):
            await looking
        assert other.records.list() == []
        assert (await other.extractor(spec()))[1]


async def test_what_was_made_while_the_store_was_slow_is_deleted_by_others(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: None
) -> None:
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        slow = Held(monkeypatch, Store, "save")
        with monkeypatch.context() as hasty:
            hasty.setattr(sharing, "TIMEOUT_SECONDS", 0.3)
            record = await built(one)
        slow.resume.set()
        await until(lambda: ids(url) == {record.id})
        await other.extractor(spec(name="x"), PATIENCE, keep=True)
        await until(lambda: one.readiness()[1] == "ready")
        assert await one.extractors.look_up("x") is record
        await other.extractors.delete("x")
        with pytest.raises(UnknownExtractor):
            await one.extractors.look_up(record.id)


async def test_a_name_that_cannot_be_given_leaves_an_extractor_saved(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: None
) -> None:
    def fail(*args: object) -> None:
        raise store.StoreError("no")

    folder, aside = tmp_path / "store", tmp_path / "aside"
    async with engine(extractors=str(folder)) as one, engine(extractors=str(folder)) as other:
        folder.rename(aside)
        record = await built(one)
        aside.rename(folder)
        await until(lambda: one.readiness()[1] == "ready")
        with monkeypatch.context() as broken:
            broken.setattr(Store, "claim", fail)
            with pytest.raises(NotReady):
                await one.extractor(spec(name="x"), keep=True)
        await other.extractors.delete(record.id)
        with pytest.raises(UnknownExtractor):
            await one.extractors.look_up(record.id)


@pytest.mark.parametrize("shared", [True, False])
async def test_an_id_given_as_a_name_lets_a_reader_make_nothing(
    engine: MakeEngine, tmp_path: Path, shared: bool
) -> None:
    async with engine() as elsewhere:
        id = (await elsewhere.extractor(spec()))[0].id
    async with engine(**{"extractors": str(tmp_path / "store")} if shared else {}) as one:
        await one.extractor(spec(nodes=["features.3"], name=id), PATIENCE, keep=True)
        with pytest.raises(Forbidden):
            await one.extractor(spec(), build=False)
        assert len(one.records.list()) == 1


async def test_of_several_that_want_one_name_the_others_are_built_without_it(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, together = Store.find, threading.Barrier(3)

    def at_once(store: Store, key: str) -> str | None:
        found = find(store, key)
        if key == "x":
            together.wait(PATIENCE)
        return found

    url = str(tmp_path / "store")
    monkeypatch.setattr(Store, "find", at_once)
    async with engine(extractors=url) as one, engine(extractors=url) as two, engine(extractors=url) as three:
        engines = (one, two, three)
        wanted = [spec(nodes=[f"features.{number}"], name="x") for number in (2, 3, 4)]
        given = await asyncio.gather(
            *(each.extractor(kind, keep=True) for each, kind in zip(engines, wanted, strict=True)),
            return_exceptions=True,
        )
        assert [type(each) for each in given].count(NameTaken) == 2
        records = [record for each in engines for record in each.records.list()]
        await until(lambda: [record.state for record in records] == ["ready"] * 3)
        assert [record.name for record in records].count("x") == 1


async def test_a_store_with_all_its_names_takes_no_extractor_for_another(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "NAMES_PER_EXTRACTOR", 0)
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one:
        with pytest.raises(StoreFull, match="names"):
            await one.extractor(spec(name="x"), keep=True)
        assert ids(url) == set()


async def test_a_deletion_in_a_store_that_has_just_gone_is_refused(engine: MakeEngine, tmp_path: Path) -> None:
    """Or the extractor would come back with it."""
    folder, aside = tmp_path / "store", tmp_path / "aside"
    async with engine(extractors=str(folder)) as one:
        record = await built(one)
        folder.rename(aside)
        with pytest.raises(NotReady, match=r"store\.json is missing"):
            await one.extractors.delete(record.id)
        assert one.records.known(record.id) is record


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


async def test_listings_take_turns_and_keep_no_read_waiting(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    store.open()
    ids = [f"{number:012x}" for number in range(120)]
    for id in ids:
        store.save(Stored(id=id, spec=spec(), return_nodes={"layer4": "layer4"}, fingerprint="fingerprint"))
    pages, gate, begun = Store.pages, threading.Event(), []

    def held(store: Store) -> Any:
        begun.append(store)
        assert gate.wait(PATIENCE)
        yield from pages(store)

    monkeypatch.setattr(Store, "pages", held)
    async with engine(extractors=str(tmp_path)) as running:
        listings = [asyncio.create_task(running.extractors.elsewhere()) for _ in range(8)]
        await until(lambda: begun)
        assert running._sharing is not None
        assert await asyncio.gather(*map(running._sharing.find, ids[:8])) == ids[:8]
        assert len(begun) == 1
        gate.set()
        for listed in await asyncio.gather(*listings):
            assert [stored.id for stored, _ in listed] == ids


async def test_listings_that_hang_keep_nothing_else_waiting(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), []

    def hang(store: Store) -> Any:
        begun.append(store)
        assert gate.wait(2 * PATIENCE)
        yield []

    async with engine(extractors=str(tmp_path / "store")) as one:
        record, _ = await one.extractor(spec(), PATIENCE, keep=True)
        monkeypatch.setattr(Store, "pages", hang)
        leaving = [asyncio.create_task(one.extractors.elsewhere()) for _ in range(8)]
        for listing in leaving:
            await until(lambda: begun)
            listing.cancel()
            await asyncio.sleep(0.01)  # the next one begins
        assert one._sharing is not None
        assert await one._sharing.find(record.id) == record.id
        gate.set()


async def test_what_is_written_waits_for_the_same_extractor_only(engine: MakeEngine, tmp_path: Path) -> None:
    async with engine(extractors=str(tmp_path / "store")) as one:
        assert one._sharing is not None
        gate, done = threading.Event(), []
        write = one._sharing.write
        slow = [asyncio.create_task(write("a", lambda: done.append(gate.wait(PATIENCE)))) for _ in range(8)]
        await asyncio.gather(*(write(f"{number:012x}", lambda: None) for number in range(32)))
        assert done == []
        gate.set()
        await asyncio.gather(*slow)
        assert done == [True] * 8


async def test_what_the_store_has_is_not_written_again(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        record, _ = await one.extractor(spec(), PATIENCE, keep=True)
        monkeypatch.setattr(Store, "save", None)
        again, created = await other.extractor(spec(), keep=True)
        assert (again.id, created) == (record.id, False)


async def test_a_full_disk_is_served_from_and_written_later(engine: MakeEngine, tmp_path: Path, later: None) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = str(disk.path / "store")
        async with engine(extractors=url) as before:
            known, _ = await before.extractor(spec(name="r"), PATIENCE, keep=True)
        disk.fill()
        async with engine(extractors=url) as one:
            await until(lambda: "No space left on device" in one.readiness()[1])
            assert one.readiness()[0]
            assert (await one.extractors.look_up("r")).id == known.id
            with pytest.raises(NotReady, match="No space left on device"):
                await one.extractor(spec(nodes=["features.8"], name="other"), keep=True)
            record = await built(one, nodes=["features.8"])
            assert not record.saved
            disk.free()
            await until(lambda: one.readiness() == (True, "ready"))
            await built(one, nodes=["features.8"])
            assert ids(url) == {known.id, record.id}


async def test_a_store_that_was_repaired_is_not_called_damaged(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_DAMAGE_SECONDS", 2 * PATIENCE)
    Store(str(tmp_path)).open()
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
            (await one.extractor(spec(nodes=[f"features.{number}"], name=f"n{number}"), keep=True))[0]
            for number in (4, 5)
        ]
        with pytest.raises(StoreFull, match="the store has 3 extractors and may have 3; delete"):
            await one.extractor(spec(nodes=["features.6"]), keep=True)
        assert await one.extractor(spec(nodes=["features.4"], name="again"), keep=True) == (asked_for[0], False)
        stored = {record.id for record in (by_the_way[0], *asked_for)}
        assert ids(url) == stored
        async with engine(extractors=url, max_stored_extractors=3) as other:
            with pytest.raises(StoreFull):
                await other.extractor(spec(nodes=["features.6"]), keep=True)
        await one.extractors.delete("n5")
        assert (await one.extractor(spec(nodes=["features.6"]), keep=True))[1]
