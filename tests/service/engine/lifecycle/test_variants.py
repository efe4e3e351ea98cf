"""Variants for other sizes, of models that are built for one: shared weights, one build each, a bounded number."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from fxcore.backends.backend import storages_of, tensors_of
from fxcore.errors import BadTensor
from service.engine import Engine, ExtractorRecord, FeatureOptions
from service.engine.backends.upgrades import WORTH_A_COPY
from service.engine.lifecycle import variants
from tests.service.engine.fake_backends import Held
from tests.service.engine.running import PATIENCE, MakeEngine, built, encoded

pytestmark = pytest.mark.anyio

AVERAGE = FeatureOptions(pool="avg")


def image(height: int, width: int) -> bytes:
    return encoded(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8), "PNG")


async def native(running: Engine, **rest: Any) -> ExtractorRecord:
    """Build an extractor of images of any size, over a model that is built for one."""
    return await built(running, "timm.test_vit", ["blocks"], **{"image_size": 64, "fit": "native", **rest})


@pytest.mark.exhaustive
async def test_sizes_share_weights_and_are_built_once(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await native(running)
        images = [image(64, 64), image(64, 96), image(96, 64)]
        each = await asyncio.gather(*(running.features(record, [one], AVERAGE) for one in images))
        together = await asyncio.gather(*(running.features(record, images[::-1], AVERAGE) for _ in range(3)))
        for result in together:
            for row, alone in zip(result.outputs["blocks"], reversed(each), strict=True):
                torch.testing.assert_close(row, alone.outputs["blocks"][0], rtol=1e-4, atol=1e-4)
        runtime = record.runtime
        assert set(runtime.variants) == {(64, 96), (96, 64)}
        assert len({id(one.extractor.graph) for one in runtime.all}) == 3
        [loaded] = running.models.loaded().values()
        own = storages_of(tensors_of(loaded.module))
        for sized in runtime.variants.values():
            held = storages_of(tensors_of(sized.extractor.module))
            assert sum(held.values()) > 100 * sum(size for at, size in held.items() if at not in own)
        before = running.eviction.bytes()
        record.retire()
        assert running.eviction.bytes() < before
        assert all(sized.retired for sized in runtime.variants.values())


@pytest.mark.exhaustive
async def test_a_size_is_not_evicted_between_its_build_and_its_use(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await native(running)
        record.pinned = True
        runtime, eviction = record.runtime, running.eviction
        request = asyncio.create_task(running.features(record, [image(64, 96)], AVERAGE))
        while not (builds := [task for task in asyncio.all_tasks() if task.get_name().endswith("build")]):
            assert not request.done()
            await asyncio.sleep(0)
        builds[0].add_done_callback(lambda _: eviction.make_room(10**15))
        await request
        assert not runtime.variants[64, 96].retired
        assert not runtime.variants[64, 96].busy
        eviction.make_room(10**15)
        assert not runtime.variants


@pytest.mark.exhaustive
async def test_the_least_recently_used_size_goes_first(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MOST", 2)
    async with engine() as running:
        record = await native(running, image_size=32)
        runtime = record.runtime
        images = [image(32, 32 + 16 * more) for more in range(1, 4)]
        for one in (images[0], images[1], images[0], images[2]):
            await running.features(record, [one], AVERAGE)
        assert set(runtime.variants) == {(32, 48), (32, 80)}
        whole = await running.features(record, images, AVERAGE)  # all three are in use at once
        assert whole.outputs["blocks"].shape == (3, 64)


@pytest.mark.exhaustive
async def test_a_size_that_the_model_cannot_take(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await native(running)
        sent = {"x": torch.zeros(1, 3, 60, 64)}
        with pytest.raises(BadTensor, match="cannot take an input of 60 x 64"):
            await running.features(record, sent, AVERAGE)
        assert (await running.features(record, {"x": torch.zeros(1, 3, 32, 64)}, AVERAGE)).images == 1


@pytest.mark.exhaustive
async def test_a_size_that_comes_often_gets_faster(engine: MakeEngine, held: Held) -> None:
    """Eager serves what comes once; what a size is lowered to replaces it alone, and agrees with it."""
    async with engine(lowering=True, max_batch=4) as running:
        record = await native(running)
        runtime = record.runtime
        often, once, usual = image(64, 96), image(96, 64), image(64, 64)
        before = await running.features(record, [often] * (WORTH_A_COPY - 1) + [once], AVERAGE)
        assert not held.begun
        assert [(size, one.images) for size, one in runtime.variants.items()] == [((64, 96), 15), ((96, 64), 1)]
        await running.features(record, [often], AVERAGE)
        await held.began("blocks")
        held.open.set()
        sized = runtime.variants[64, 96]
        await asyncio.wait_for(asyncio.shield(sized.upgrade), PATIENCE)
        assert sized.checks["candidates"][1]["state"] in ("serving", "slower")
        assert [one.wanted.is_set() for one in (runtime, runtime.variants[96, 64])] == [False, False]
        after = await running.features(record, [often, once], AVERAGE)
        for row, of in ((0, 0), (1, -1)):
            torch.testing.assert_close(after.outputs["blocks"][row], before.outputs["blocks"][of], rtol=1e-4, atol=1e-4)
        await running.features(record, [usual], AVERAGE)
        assert runtime.wanted.is_set()  # the extractor's own size has its own search, as ever


@pytest.mark.exhaustive
async def test_sizes_are_evicted_under_the_memory_budget(engine: MakeEngine) -> None:
    """Where an extractor must stay, its other sizes go; one in use stays."""
    async with engine() as running:
        record = await native(running)
        runtime, eviction = record.runtime, running.eviction
        images = [image(64, 96), image(96, 64)]
        before = await running.features(record, images, AVERAGE)
        record.pinned = True
        with runtime.variants[96, 64].in_use():
            eviction.make_room(10**15)
            assert set(runtime.variants) == {(96, 64)}
        assert record.runtime is runtime
        again = await running.features(record, images, AVERAGE)
        torch.testing.assert_close(again.outputs["blocks"], before.outputs["blocks"])
        assert not any(sized.retired for sized in runtime.variants.values())


@pytest.mark.exhaustive
async def test_each_size_has_the_backend_that_is_named(engine: MakeEngine, faster: None) -> None:
    async with engine() as running:
        named, eager = await native(running, backend="openvino"), await native(running, backend="eager")
        images = [image(64, 96), image(64, 64)]
        found, expected = [await running.features(record, images, AVERAGE) for record in (named, eager)]
        torch.testing.assert_close(found.outputs["blocks"], expected.outputs["blocks"], rtol=1e-4, atol=1e-4)
        assert named.runtime.variants[64, 96].backend == "openvino"
