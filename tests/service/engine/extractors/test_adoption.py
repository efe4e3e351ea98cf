"""Extractors and names that another process made, of an engine over the same store."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from fxcore.errors import UnknownWeights
from service.engine.extractors import extractors, resolving, sharing, store
from service.engine.extractors.store import Store
from service.problems import Forbidden, NameTaken, NotReady, StoreFull, UnknownExtractor
from tests.service.engine.extractors.shared_store import Held, Pair, away, ids
from tests.service.engine.running import PATIENCE, MakeEngine, built, spec, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patience")]


async def test_a_name_that_moves_while_another_process_looks_it_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds later it names the extractor that the store says, though the one that had it exists again."""
    one, other = pair
    first, _ = await one.extractors.get(spec(name="x"), PATIENCE, keep=True)
    held = Held(monkeypatch, resolving, "resolve")
    looking = asyncio.create_task(other.extractors.look_up("x"))
    await until(held.begun.is_set)
    await one.extractors.delete(first.id)
    again, _ = await one.extractors.get(spec(), PATIENCE, keep=True)
    second, _ = await one.extractors.get(spec(nodes=["features.3"], name="x"), PATIENCE, keep=True)
    held.resume.set()
    await looking
    assert again.id == first.id
    monkeypatch.setattr(extractors, "CHECK_SECONDS", 0.0)
    assert (await other.extractors.look_up("x")).id == second.id


async def test_an_adoption_goes_on_when_its_request_leaves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    record, _ = await one.extractors.get(spec(), PATIENCE, keep=True)
    held = Held(monkeypatch, resolving, "resolve")
    looking = asyncio.create_task(other.extractors.look_up(record.id))
    await until(held.begun.is_set)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    held.resume.set()
    await until(lambda: other.records.get(record.id) is not None)


async def test_what_cannot_be_adopted_is_resolved_once_for_all_who_wait(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    record, _ = await one.extractors.get(spec(), PATIENCE, keep=True)
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


async def test_what_is_deleted_while_it_is_adopted_stays_deleted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a request for its nodes made it known first."""
    one, other = pair
    record, _ = await one.extractors.get(spec(name="x"), PATIENCE, keep=True)
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
    assert (await other.extractors.get(spec()))[1]


async def test_what_was_made_while_the_store_was_slow_is_deleted_by_others(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: None
) -> None:
    one, other = pair
    slow = Held(monkeypatch, Store, "save")
    with monkeypatch.context() as hasty:
        hasty.setattr(sharing, "TIMEOUT_SECONDS", 0.3)
        record = await built(one)
    slow.resume.set()
    await until(lambda: ids(str(tmp_path / "store")) == {record.id})
    await other.extractors.get(spec(name="x"), PATIENCE, keep=True)
    await until(lambda: one.readiness()[1] == "ready")
    assert await one.extractors.look_up("x") is record
    await other.extractors.delete("x")
    with pytest.raises(UnknownExtractor):
        await one.extractors.look_up(record.id)


@pytest.mark.exhaustive
async def test_a_name_that_cannot_be_given_leaves_an_extractor_saved(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: None
) -> None:
    def fail(*args: object) -> None:
        raise store.StoreError("no")

    one, other = pair
    with away(tmp_path):
        record = await built(one)
    await until(lambda: one.readiness()[1] == "ready")
    with monkeypatch.context() as broken:
        broken.setattr(Store, "claim", fail)
        with pytest.raises(NotReady):
            await one.extractors.get(spec(name="x"), keep=True)
    await other.extractors.delete(record.id)
    with pytest.raises(UnknownExtractor):
        await one.extractors.look_up(record.id)


@pytest.mark.parametrize("shared", [True, False])
async def test_an_id_given_as_a_name_lets_a_reader_make_nothing(
    engine: MakeEngine, tmp_path: Path, shared: bool
) -> None:
    async with engine() as elsewhere:
        id = (await elsewhere.extractors.get(spec()))[0].id
    async with engine(**{"extractors": str(tmp_path / "store")} if shared else {}) as one:
        old = spec(nodes=["features.3"]).model_copy(update={"name": id})  # such names are refused since
        await one.extractors.get(old, PATIENCE, keep=True)
        with pytest.raises(Forbidden):
            await one.extractors.get(spec(), build=False)
        assert len(one.records.list()) == 1


async def test_a_name_like_an_id_that_is_in_the_store_still_works(engine: MakeEngine, tmp_path: Path) -> None:
    name, url = "0123456789ab", str(tmp_path / "store")
    async with engine(extractors=url) as one:
        record, _ = await one.extractors.get(spec().model_copy(update={"name": name}), PATIENCE, keep=True)
    async with engine(extractors=url) as other:
        assert [(stored.id, own) for stored, own in await other.extractors.elsewhere()] == [(record.id, name)]
        found = await other.extractors.look_up(name)
        assert (found.id, found.name) == (record.id, name)


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
            *(each.extractors.get(kind, keep=True) for each, kind in zip(engines, wanted, strict=True)),
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
            await one.extractors.get(spec(name="x"), keep=True)
        assert ids(url) == set()
