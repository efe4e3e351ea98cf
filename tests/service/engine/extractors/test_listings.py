"""Lists of what a store has, beside other reads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from service.engine.extractors.store import Store
from tests.service.engine.extractors.conftest import AtomicPuts
from tests.service.engine.extractors.shared_store import IDS, extractor, opened
from tests.service.engine.running import PATIENCE, MakeEngine, spec, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patience")]


async def test_listings_take_turns_and_keep_no_read_waiting(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(str(tmp_path))
    for id in IDS:
        store.save(extractor(id))
    listed, gate, begun = Store.all, threading.Event(), []

    def held(store: Store) -> Any:
        begun.append(store)
        assert gate.wait(PATIENCE)
        return listed(store)

    monkeypatch.setattr(Store, "all", held)
    async with engine(extractors=str(tmp_path)) as running:
        listings = [asyncio.create_task(running.extractors.elsewhere()) for _ in range(8)]
        await until(lambda: begun)
        assert await asyncio.gather(*map(running._sharing.find, IDS[:8])) == IDS[:8]
        assert len(begun) == 1
        gate.set()
        for found in await asyncio.gather(*listings):
            assert [stored.id for stored, _ in found] == IDS


@pytest.mark.exhaustive
def test_objects_of_a_bucket_are_listed_concurrently(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, those of a large store would take minutes."""
    store, ids = opened(f"{bucket}/listed"), IDS[:4]
    for id in ids:
        store.save(extractor(id))
    answer, asked, together = AtomicPuts.__call__, set(), threading.Event()

    def answer_together(app: AtomicPuts, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] == "GET" and "/specs/" in environ["PATH_INFO"]:
            asked.add(environ["PATH_INFO"])
            if len(asked) == len(ids):
                together.set()
            assert together.wait(3.0)  # less than the timeout of the driver, which tries again
        return answer(app, environ, start_response)

    monkeypatch.setattr(AtomicPuts, "__call__", answer_together)
    try:
        assert [stored.id for stored, _ in store.all()] == ids
    finally:
        together.set()


async def test_listings_that_hang_keep_nothing_else_waiting(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), []

    def hang(store: Store) -> Any:
        begun.append(store)
        assert gate.wait(2 * PATIENCE)
        return []

    async with engine(extractors=str(tmp_path / "store")) as one:
        record, _ = await one.extractors.get(spec(), PATIENCE, keep=True)
        monkeypatch.setattr(Store, "all", hang)
        leaving = [asyncio.create_task(one.extractors.elsewhere()) for _ in range(8)]
        for listing in leaving:
            await until(lambda: begun)
            listing.cancel()
            await asyncio.sleep(0.01)  # the next one begins
        assert await one._sharing.find(record.id) == record.id
        gate.set()
