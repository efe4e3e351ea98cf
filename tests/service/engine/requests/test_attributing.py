"""Attributions among other work of the engine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from service.engine import Engine, ExtractorRecord
from service.engine.requests.admission.admission import Reservation
from service.engine.requests.attributing import Attributed, Question
from service.problems import ComputeFailed, RequestTooLarge
from tests.service.engine.running import PATIENCE, MakeEngine, built, halves, values_of

pytestmark = pytest.mark.anyio


async def attribute(running: Engine, half: ExtractorRecord, values: dict[str, Any], *question: Any) -> Attributed:
    with Reservation(running.admission, "client") as reservation:
        return await running.attribute(half, values, Question(*question), reservation)


@pytest.mark.exhaustive
async def test_what_nobody_waits_for_ends_after_its_pass(engine: MakeEngine) -> None:
    async with engine() as running:
        half, at = await halves(running, "features.8")
        values = values_of(half, rows=1, size=2)
        runtime = await running.runtimes.load(half)
        passes: list[object] = []
        begun, go_on = threading.Event(), threading.Event()

        def hold(module: torch.nn.Module, given: object) -> None:
            passes.append(given)
            begun.set()
            assert go_on.wait(PATIENCE)

        runtime.extractor.module.register_forward_pre_hook(hold)
        asked = asyncio.create_task(attribute(running, half, values, "integrated_gradients", at, 0, 50))
        await asyncio.to_thread(begun.wait, PATIENCE)
        asked.cancel()
        go_on.set()
        await asyncio.wait([asked])
        after = await built(running, "mobilenet_v3_small", nodes=("features.8",), backend="eager")
        await running.features(after, {"x": torch.rand(1, 3, 64, 64)})  # the worker has gone on
        assert len(passes) < 3
        assert running.admission.requests == running.admission.bytes == 0


async def test_images_that_depend_on_their_batch_are_attributed_one_by_one(engine: MakeEngine) -> None:
    async with engine() as running:
        half, at = await halves(running, "features.8")
        runtime = await running.runtimes.load(half)
        runtime.description = replace(half.description, entry=replace(half.description.entry, batch=False))
        rows: list[int] = []
        runtime.extractor.module.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
        await attribute(running, half, values_of(half, rows=2, size=2), "gradient", at, 0)
        assert set(rows) == {1}  # the check of the backend may run beside it


async def test_rows_over_the_memory_in_flight_are_attributed_one_by_one(engine: MakeEngine) -> None:
    async with engine(max_inflight_bytes=20_000_000) as running:
        half, at = await halves(running, "features.0")
        runtime = await running.runtimes.load(half)
        rows: list[int] = []
        runtime.extractor.module.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
        found = await attribute(running, half, values_of(half, rows=3, size=112), "gradient", at, 0)
        assert len(found.values) == 3
        assert set(rows) == {1}  # as above
        with pytest.raises(RequestTooLarge):
            await attribute(running, half, values_of(half, rows=1, size=224), "gradient", at, 0)


@pytest.mark.parametrize("error", [RuntimeError("no gradient"), SystemError("Resource temporarily unavailable")])
async def test_errors_of_a_pass_are_problems(engine: MakeEngine, error: Exception) -> None:
    def fail(module: torch.nn.Module, given: object) -> None:
        raise error

    async with engine() as running:
        half, at = await halves(running, "features.8")
        values = values_of(half, rows=1, size=2)
        runtime = await running.runtimes.load(half)
        runtime.extractor.module.register_forward_pre_hook(fail)
        with pytest.raises(ComputeFailed, match=str(error)):
            await attribute(running, half, values, "gradient", at, 0)
