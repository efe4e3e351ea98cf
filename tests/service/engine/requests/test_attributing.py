"""Attributions among other work of the engine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from service.engine.requests.admission.admission import Reservation
from service.engine.requests.attributing import Question
from service.problems import ComputeFailed, RequestTooLarge
from tests.service.engine.running import PATIENCE, MakeEngine, built

pytestmark = pytest.mark.anyio

STEPS = 50


class Passes:
    """Counts the passes through a module, which wait while ``open`` is not set."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.count = 0
        self.begun, self.open = threading.Event(), threading.Event()
        self._handle = module.register_forward_pre_hook(self._enter)

    def _enter(self, module: torch.nn.Module, given: object) -> None:
        self.count += 1
        self.begun.set()
        assert self.open.wait(PATIENCE)


@pytest.mark.exhaustive
async def test_what_nobody_waits_for_ends_after_its_pass(engine: MakeEngine) -> None:
    async with engine(lowering=False) as running:
        half = await built(running, "mobilenet_v3_small", nodes=("classifier",), inputs=["features.8"], backend="eager")
        [begin] = half.description.inputs
        values = {begin.name: torch.rand(1, *(size or 2 for size in begin.shape[1:]))}
        runtime = await running.runtimes.load(half)
        passes = Passes(runtime.extractor.module)
        at = (await built(running, "mobilenet_v3_small", nodes=("features.8",), backend="eager")).outputs[0]
        question = Question("integrated_gradients", at, 0, STEPS)
        with Reservation(running.admission, "client") as reservation:
            asked = asyncio.create_task(running.attribute(half, values, question, reservation))
            await asyncio.to_thread(passes.begun.wait, PATIENCE)
            asked.cancel()
            passes.open.set()
            await asyncio.wait([asked])
        after = await built(running, "mobilenet_v3_small", nodes=("features.8",), backend="eager")
        await running.features(after, {"x": torch.rand(1, 3, 64, 64)})  # the worker has gone on
        assert passes.count < 3
        assert running.admission.requests == running.admission.bytes == 0


async def test_images_that_depend_on_their_batch_are_attributed_one_by_one(engine: MakeEngine) -> None:
    async with engine(lowering=False) as running:
        half = await built(running, "mobilenet_v3_small", nodes=("classifier",), inputs=["features.8"], backend="eager")
        [begin] = half.description.inputs
        at = (await built(running, "mobilenet_v3_small", nodes=("features.8",), backend="eager")).outputs[0]
        runtime = await running.runtimes.load(half)
        runtime.description = replace(half.description, entry=replace(half.description.entry, batch=False))
        rows: list[int] = []
        runtime.extractor.module.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
        values = {begin.name: torch.rand(2, *(size or 2 for size in begin.shape[1:]))}
        with Reservation(running.admission, "client") as reservation:
            await running.attribute(half, values, Question("gradient", at, 0), reservation)
        assert set(rows) == {1}  # the check of the backend may run beside it


async def test_rows_over_the_memory_in_flight_are_attributed_one_by_one(engine: MakeEngine) -> None:
    async with engine(lowering=False, max_inflight_bytes=20_000_000) as running:
        half = await built(running, "mobilenet_v3_small", nodes=("classifier",), inputs=["features.0"], backend="eager")
        at = (await built(running, "mobilenet_v3_small", nodes=("features.0",), backend="eager")).outputs[0]
        [begin] = half.description.inputs
        runtime = await running.runtimes.load(half)
        rows: list[int] = []
        runtime.extractor.module.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
        values = {begin.name: torch.rand(3, *(size or 112 for size in begin.shape[1:]))}
        with Reservation(running.admission, "client") as reservation:
            found = await running.attribute(half, values, Question("gradient", at, 0), reservation)
        assert len(found.values) == 3
        assert set(rows) == {1}  # as above
        large = {begin.name: torch.rand(1, *(size or 224 for size in begin.shape[1:]))}
        with Reservation(running.admission, "client") as reservation, pytest.raises(RequestTooLarge):
            await running.attribute(half, large, Question("gradient", at, 0), reservation)


@pytest.mark.parametrize("error", [RuntimeError("no gradient"), SystemError("Resource temporarily unavailable")])
async def test_errors_of_a_pass_are_problems(engine: MakeEngine, error: Exception) -> None:
    def fail(module: torch.nn.Module, given: object) -> None:
        raise error

    async with engine(lowering=False) as running:
        half = await built(running, "mobilenet_v3_small", nodes=("classifier",), inputs=["features.8"], backend="eager")
        [begin] = half.description.inputs
        values = {begin.name: torch.rand(1, *(size or 2 for size in begin.shape[1:]))}
        at = (await built(running, "mobilenet_v3_small", nodes=("features.8",), backend="eager")).outputs[0]
        runtime = await running.runtimes.load(half)
        runtime.extractor.module.register_forward_pre_hook(fail)
        with Reservation(running.admission, "client") as reservation:
            asked = running.attribute(half, values, Question("gradient", at, 0, 1), reservation)
            with pytest.raises(ComputeFailed, match=str(error)):
                await asked
