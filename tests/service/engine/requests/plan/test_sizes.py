"""The predicted sizes of rows: how much is kept of them, what they limit, and that nobody waits for all of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fxcore.errors import ImageTooLarge
from service.engine import FeatureOptions
from service.engine.requests.plan.sizes import sizes
from service.engine.requests.plan.tensors import plan_tensors
from service.engine.runtime.row_sizes import OUTPUT_BYTES, SIZES_BYTES
from service.engine.threads import in_pool
from service.schemas.specs import MAX_NODES
from tests.service.engine.running import MakeEngine, built, encoded, until

pytestmark = pytest.mark.anyio


@pytest.mark.exhaustive
async def test_sizes_are_kept_up_to_so_many_bytes(engine: MakeEngine) -> None:
    """Requests choose shapes, and subsets of the outputs, of which there are more than memory holds."""
    nodes = [f"features.{number}" for number in range(13)]
    async with engine() as running:
        record = await built(running, "squeezenet1_1", nodes)
        before = running.eviction.bytes()
        for side in range(64, 264):
            record.runtime.sizes.row(((3, side, side),))
        plan = plan_tensors(record.description, {"x": torch.zeros(1, 3, 64, 64)}, "none", 10**9)
        runtimes = dict.fromkeys(plan.shapes, record.runtime)
        for number in range(1, 600):
            keys = frozenset(key for bit, key in enumerate(nodes) if number >> bit & 1)
            options, intake = FeatureOptions(keys=keys), running.threads.intake
            await sizes(record.description, runtimes, plan, plan.shapes, options, 10**9, intake)
        kept = record.runtime.sizes.bytes
        assert SIZES_BYTES < kept <= 2 * SIZES_BYTES
        assert running.eviction.bytes() - before == kept
        # What was dropped is found again.
        values = {"x": torch.zeros(1, 3, 64, 64)}
        assert (await running.features(record, values, FeatureOptions(keys=frozenset(nodes[:1])))).images == 1
        running.runtimes.unload(record)
        again = await running.runtimes.load(record)
        assert again.sizes.bytes == 0


def test_the_sizes_of_the_most_outputs_are_kept() -> None:
    added = ("itself", "region_image", "valid_box")
    assert OUTPUT_BYTES * (MAX_NODES + len(added)) <= SIZES_BYTES


async def test_rows_that_need_more_than_a_batch_may(engine: MakeEngine) -> None:
    """Only those of a usual size are computed all the same: the model could not be used otherwise."""
    async with engine(max_batch_bytes=125_000) as running:
        record = await built(running)
        options = FeatureOptions(pool="avg", preprocess="none")
        usual, larger = (encoded(np.zeros((size, size, 3), np.uint8), "PNG") for size in (300, 400))
        assert (await running.features(record, [usual], options)).images == 1
        taken = record.runtime.sizes.row(((3, 400, 400),)).bytes
        with pytest.raises(
            ImageTooLarge, match=f"image 1: .* 3 x 400 x 400 would need {taken:,} bytes.* 1,000,000"
        ) as caught:
            await running.features(record, [usual, larger], options)
        with pytest.raises(ImageTooLarge, match=r"image 0: .*send a smaller one"):
            await running.features(record, {"x": torch.zeros(1, 3, 400, 400)}, options)
        assert caught.value.extra == {"index": 1, "pixels": 400 * 400, "limit": 400 * 400 * 1_000_000 // taken}


async def test_shapes_are_predicted_one_at_a_time(engine: MakeEngine) -> None:
    """A request that is given up stops after the shape at hand, and others are planned in between."""
    images = [encoded(np.zeros((32, 32 + width, 3), np.uint8), "PNG") for width in range(64)]
    async with engine() as running:
        record = await built(running)
        known = record.runtime.sizes
        request = asyncio.create_task(running.features(record, images, FeatureOptions(pool="avg", preprocess="none")))
        await until(lambda: known.bytes)
        request.cancel()
        await in_pool(running.threads.intake, lambda: None)
        options = FeatureOptions(pool="avg")
        assert None in [known.known(((3, 32, 32 + width),), options) for width in range(64)]


@pytest.mark.exhaustive
async def test_the_flops_of_rows_are_torchs(engine: MakeEngine) -> None:
    """Those of rows of about the usual size are in proportion to it."""
    async with engine() as running:
        runtime = (await built(running, "mobilenet_v3_small", nodes=["features.12"])).runtime
        for width, tolerance in ((224, 0.0), (64, 0.1), (300, 0.1), (448, 0.1), (480, 0.0)):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                runtime.extractor.module(torch.zeros(1, 3, 224, width))
            found = runtime.sizes.row(((3, 224, width),)).flops
            assert found == pytest.approx(counter.get_total_flops(), rel=tolerance)
