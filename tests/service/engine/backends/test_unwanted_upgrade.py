"""What nobody wants any more is not lowered, and what is being lowered for it ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.service.engine.fake_backends import Held, settled
from tests.service.engine.running import PATIENCE, MakeEngine, Watched, built, spec, tensors, until

pytestmark = pytest.mark.anyio
pytest.importorskip("openvino")


@pytest.mark.exhaustive
@pytest.mark.parametrize("action", ["delete", "unload"])
async def test_nothing_is_lowered_for_what_is_gone(engine: MakeEngine, held: Held, action: str) -> None:
    """Who is wanted does not wait for it, nor is it begun when a request ends that was on its way."""
    async with engine(lowering=True, max_batch=2) as running:
        nodes = ("features.3", "features.4", "features.5", "features.6")
        lowering, queued, unused, wanted = [await built(running, nodes=[node]) for node in nodes]
        runtimes = [record.runtime for record in (lowering, queued)]
        await running.features(lowering, tensors(*range(16)))
        await held.began("features.3")
        await running.features(queued, tensors(*range(16)))
        for record in (unused, queued, lowering):  # who comes next is lowered as soon as this one is not
            if action == "delete":
                await running.extractors.delete(record.id)
            else:
                running.runtimes.unload(record)
        if action == "delete":
            await running.features(unused, tensors(*range(16)))
            assert not unused.runtime.wanted.is_set()
        await running.features(wanted, tensors(0))
        await held.began("features.3", "features.6")
        held.open.set()
        await settled(wanted)
        assert [runtime.upgrade is not None and runtime.upgrade.cancelled() for runtime in runtimes] == [True, True]
        assert [record.backend for record in (lowering, queued)] == ["eager", "eager"]
        if action == "unload":
            known = running.records.find(queued.id)
            await running.features(known, tensors(*range(16)))
            await settled(known)
            await held.began("features.3", "features.6", "features.4")


async def test_an_extractor_that_waits_for_its_search_can_be_evicted(engine: MakeEngine, held: Held) -> None:
    async with engine(lowering=True) as running:
        lowering, waiting = await built(running, nodes=["features.3"]), await built(running, nodes=["features.4"])
        await running.features(lowering, tensors(0))
        await held.began("features.3")
        await running.features(waiting, tensors(*range(16)))
        runtime = waiting.runtime
        await until(lambda: len(runtime.candidates) == 2)
        assert runtime.candidates[1].state == "waiting"
        running.eviction.make_room(running.settings.memory_budget)
        assert lowering.runtime is not None
        assert waiting.runtime is None
        await asyncio.wait({runtime.upgrade}, timeout=PATIENCE)
        held.open.set()
        await settled(lowering)
        assert held.begun == [["features.3"]]


async def test_a_cancelled_build_lowers_nothing(engine: MakeEngine, held: Held) -> None:
    async with engine() as running:
        await running.extractors.get(spec(nodes=["features.3"], backend="openvino"))
        await held.began("features.3")  # builds begin at once, in an order of their own
        await running.extractors.get(spec(nodes=["features.4"], backend="openvino"))
        records = running.records.list()
        builds = [record.build for record in records if record.build is not None]
        assert len(builds) == 2
        for record in records[::-1]:  # the second is lowered as soon as the first is not
            await running.extractors.delete(record.id)
        await asyncio.wait(builds, timeout=PATIENCE)
        for record, build in zip(records, builds, strict=True):
            assert build.cancelled()
            assert record.failure is None  # a request that still holds it builds it again
        await held.began("features.3")


async def test_a_request_has_what_it_waits_for_lowered(engine: MakeEngine, held: Held) -> None:
    """Deleting lets it end normally."""
    async with engine() as running:
        record, _ = await running.extractors.get(spec(nodes=["features.3"], backend="openvino"))
        request = asyncio.create_task(running.features(record, tensors(0)))
        await held.began("features.3")
        await running.extractors.delete(record.id)
        held.open.set()
        assert (await request).images == 1


async def test_closing_ends_what_is_being_lowered(engine: MakeEngine, held: Held) -> None:
    async with engine(lowering=True) as running:
        improved = await built(running, nodes=["features.3"])
        await running.features(improved, tensors(0))
        await held.began("features.3")
        named, _ = await running.extractors.get(spec(nodes=["features.4"], backend="openvino"))
        await held.began("features.3", "features.4")
        build = named.build
    await asyncio.wait({build}, timeout=PATIENCE)
    assert [cancelled.is_set() for cancelled in held.cancelled] == [True, True]


async def test_closing_does_not_wait_for_a_lowering(engine: MakeEngine, held: Held) -> None:
    held.deaf = True
    async with engine(lowering=True) as running:
        record = await built(running, nodes=["features.3"])
        await running.features(record, tensors(0))
        await held.began("features.3")
        let_go = threading.Timer(PATIENCE, held.open.set)
        let_go.start()
    assert not held.open.is_set()
    let_go.cancel()


async def test_an_evicted_extractor_is_lowered_once(engine: MakeEngine, held: Held) -> None:
    """Evicted while its search waits for the device, and built and used again before that is free."""
    async with engine(lowering=True) as running:
        busy, record = await built(running, nodes=["features.2"]), await built(running, nodes=["features.3"])
        watched = Watched(busy)
        await asyncio.gather(*(one.runtime.checked.wait() for one in (busy, record)))
        first = await watched.held(running.features(busy, tensors(0)))
        record.retire()  # built again, it is measured, for which the device must be free
        searches = [running._upgrades.improve(await running.runtimes.load(record))]
        record.retire()
        searches.append(running._upgrades.improve(await running.runtimes.load(record)))
        watched.open.set()
        await first
        await held.began("features.3")
        held.open.set()
        await settled(record)
        assert [search is not None and search.cancelled() for search in searches] == [True, False]
        assert held.begun == [["features.3"]]
        assert record.runtime.upgrade.exception() is None
        assert (await running.features(record, tensors(0))).images == 1
