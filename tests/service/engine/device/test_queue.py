"""Answers are put together from batches: each row once, in memory of their own, whoever shares a batch."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from service.engine import FeatureOptions
from service.engine.device.job import Item, Job
from service.engine.device.queue import BackgroundTask, Queue
from service.engine.runtime.runtime import Runtime
from service.problems import NotReady, OutOfMemory
from tests.decoding import decoded
from tests.service.engine.running import (
    OUT_OF_MEMORY,
    PATIENCE,
    MakeEngine,
    Watched,
    built,
    runtime_alone,
    tensors,
    waiting,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def alone() -> Runtime:
    """An extractor without its engine."""
    return runtime_alone()


def job(runtime: Runtime, rows: int, row_seconds: float | None = 0.0) -> Job:
    """A job whose rows take one byte each."""
    runtime.seconds_per_byte = row_seconds
    return Job(runtime, FeatureOptions(), rows)


def item(of: Job, rows: range, values: torch.Tensor, row_bytes: int = 1, *since: float) -> Item:
    return Item(of, of.runtime, rows, (values,), (tuple(values.shape[1:]),), row_bytes, *since)


async def test_a_result_that_cannot_be_assembled_fails_alone(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have of the batch is not computed, and so not counted, again: it would pass for rows to come."""

    def none_left(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    async with engine(max_batch=2) as running:
        record = await built(running)
        expected = (await running.features(record, tensors(1))).outputs
        watched = Watched(record)
        whole, lost = job(record.runtime, 2), job(record.runtime, 2)
        monkeypatch.setattr(lost, "deliver", none_left)
        rows = [(whole, 0, 0.0), (lost, 0, 5.0), (whole, 1, 1.0)]
        running._queue.put([item(of, range(i, i + 1), tensors(mark)["x"]) for of, i, mark in rows])
        response = await whole.result()
        with pytest.raises(OutOfMemory):
            await lost.result()
    assert watched.sizes == [2, 1]
    for key, values in expected.items():
        torch.testing.assert_close(response[key][1:], values, rtol=1e-5, atol=1e-5)


async def test_a_model_that_depends_on_its_batch_computes_one_row_at_a_time(engine: MakeEngine) -> None:
    async with engine(max_batch=4) as running:
        record = await built(running)
        one = dataclasses.replace(record.description, entry=dataclasses.replace(record.description.entry, batch=False))
        record.runtime.description = one
        watched = Watched(record)
        assert (await running.features(record, tensors(1, 2, 3))).images == 3
    assert watched.sizes == [1, 1, 1]


async def test_results_arrive_while_the_next_batch_is_computed(engine: MakeEngine) -> None:
    """It is announced once the next batch has begun; one that takes long, or hangs, holds no other's answer up."""
    async with engine(max_batch=1) as running:
        record = await built(running)
        watched = Watched(record)
        second_entered = threading.Event()

        def hold_the_second(batch: torch.Tensor) -> None:
            if len(watched.batches) == 2:
                second_entered.set()
                assert second_open.wait(PATIENCE)

        second_open = threading.Event()
        watched.fault = hold_the_second
        first = await watched.held(running.features(record, tensors(1)))
        second = asyncio.create_task(running.features(record, tensors(2)))
        await waiting(running, 1)
        watched.open.set()
        assert await asyncio.to_thread(second_entered.wait, PATIENCE)
        await asyncio.wait_for(asyncio.shield(first), PATIENCE)
        assert not second.done()
        second_open.set()
        await second


async def test_results_do_not_wait_for_cancelled_work(engine: MakeEngine) -> None:
    """What waits behind a batch may be dropped when the next is made of it, and then no batch begins."""
    async with engine(max_batch=1) as running:
        record = await built(running)
        watched = Watched(record)
        watched.open.clear()
        kept, dropped = job(record.runtime, 1), job(record.runtime, 1)
        running._queue.put([item(of, range(1), tensors(1)["x"]) for of in (kept, dropped)])
        await watched.begun()
        leaving = asyncio.create_task(dropped.result())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert not dropped.wanted()
        watched.open.set()
        await asyncio.wait_for(kept.result(), PATIENCE)
        assert watched.sizes == [1]


async def test_a_batch_wakes_the_event_loop_once(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    called: list[object] = []
    call_soon = loop.call_soon_threadsafe

    def counted(callback: Callable[..., object], *args: object, **rest: Any) -> asyncio.Handle:
        if threading.current_thread().name == "fxserve-cpu":
            called.append(callback)
        return call_soon(callback, *args, **rest)

    async with engine(max_batch=4) as running:
        record = await built(running)
        watched = Watched(record)
        held = await watched.held(running.features(record, tensors(0)))
        four = [asyncio.create_task(running.features(record, tensors(n))) for n in range(4)]
        await waiting(running, 4)
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        watched.open.set()
        await asyncio.gather(held, *four)
        assert watched.sizes == [1, 4]
        assert len(called) == 2


async def test_the_first_to_settle_a_job_has_the_say(alone: Runtime) -> None:
    delivered, failed = job(alone, 1), job(alone, 1)
    value = torch.ones(1, 2)
    delivered.deliver(range(1), {"y": value})
    delivered.fail(NotReady("late"))  # which also announces what nobody did
    failed.fail(NotReady("early"))
    failed.deliver(range(1), {"y": value})
    assert torch.equal((await asyncio.wait_for(delivered.result(), PATIENCE))["y"], value)
    with pytest.raises(NotReady, match="early"):
        await asyncio.wait_for(failed.result(), PATIENCE)
    assert not delivered.wanted()


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, MemoryError()])
async def test_out_of_memory_errors_have_several_forms(alone: Runtime, error: Exception) -> None:
    """Whoever fails a job of it, as a decoder does."""
    lost = job(alone, 1)
    lost.fail(error)
    with pytest.raises(OutOfMemory):
        await asyncio.wait_for(lost.result(), PATIENCE)


def put_one(queue: Queue, runtime: Runtime) -> None:
    queue.put([item(job(runtime, 1), range(1), tensors(1)["x"])])


async def test_an_overdue_task_waits_for_no_other(alone: Runtime) -> None:
    queue = Queue(1, 1)
    put_one(queue, alone)
    queue.run_idle(lambda: "patient", max_wait=PATIENCE)
    overdue = queue.run_idle(lambda: "overdue", max_wait=-1.0)
    work = queue.take()
    assert isinstance(work, BackgroundTask)
    assert work.future is overdue
    assert isinstance(queue.take(), list)


async def test_a_batch_has_its_turn_between_overdue_tasks(alone: Runtime) -> None:
    queue = Queue(1, 1)
    for _ in range(3):
        queue.run_idle(lambda: None, max_wait=-1.0)
    for _ in range(2):
        put_one(queue, alone)
    assert [type(queue.take()) for _ in range(5)] == [BackgroundTask, list, BackgroundTask, list, BackgroundTask]


async def test_a_batch_has_its_turn_after_a_task_that_ran_alone(alone: Runtime) -> None:
    queue = Queue(1, 1)
    queue.run_idle(lambda: None, max_wait=PATIENCE)
    taken_alone = queue.take()
    queue.run_idle(lambda: None, max_wait=-1.0)
    put_one(queue, alone)
    assert [type(taken_alone), type(queue.take()), type(queue.take())] == [BackgroundTask, list, BackgroundTask]


def taken(queue: Queue) -> list[Item]:
    batch = queue.take()
    assert isinstance(batch, list)
    return batch


async def test_a_closed_queue_takes_nothing(alone: Runtime) -> None:
    """Not what waits, nor what comes afterwards."""
    queue = Queue(1, 1)
    jobs = [job(alone, 1), job(alone, 1)]
    tasks = [queue.run_idle(lambda: None)]
    for late, one in enumerate(jobs):
        queue.put([item(one, range(1), tensors(1)["x"])])
        if not late:
            queue.close(NotReady("closed"))
    tasks.append(queue.run_idle(lambda: None))
    assert queue.take() is None
    for given in (*(one.result() for one in jobs), *map(asyncio.wrap_future, tasks)):
        with pytest.raises(NotReady, match="closed"):
            await asyncio.wait_for(given, PATIENCE)


async def test_many_shapes_do_not_hold_up_one(alone: Runtime) -> None:
    """A request with a batch for each of its shapes shares the device with what comes after it, and is not starved
    either. Nothing is padded: a batch has one shape."""
    queue, many = Queue(8, 10**9), job(alone, 12)
    served: list[str] = []

    def put(one: Job, since: float, *widths: int) -> None:
        rows = [torch.zeros(1, 3, 32, width) for width in widths]
        queue.put([item(one, range(i, i + 1), row, 1, since) for i, row in enumerate(rows)])

    def turn() -> None:
        batch = taken(queue)
        assert len({item.inputs[0].shape for item in batch}) == 1
        (one,) = {item.job for item in batch}
        one.computed += 1.5  # as the device worker counts
        served.append(f"{len(batch)} of many" if one is many else "one")

    put(many, 0.0, *(2 * [32, 64, 96, 128, 160, 192]))
    turn()
    put(job(alone, 1), 1.0, 224)
    for _ in range(2):
        turn()
    put(job(alone, 1), 2.0, 224)
    for _ in range(4):  # what comes after the turns that it is due comes after them
        turn()
        put(job(alone, 1), 20.0, 224)
    turn()
    assert served == ["2 of many", "one", "2 of many", "one", *4 * ["2 of many"]]


@pytest.mark.parametrize(("row_seconds", "rows"), [(None, 1), (30.0, 1), (2.0, 2), (0.01, 8)])
async def test_batches_of_slow_models_are_small(engine: MakeEngine, row_seconds: float | None, rows: int) -> None:
    """A long batch looks like one that hangs, and all other requests wait for it. The first one tells."""
    async with engine() as running:
        record = await built(running)
        queue, many = Queue(8, 10**9), job(record.runtime, 8, row_seconds)
        queue.put([item(many, range(8), torch.zeros(8, 3, 32, 32))])
        assert sum(len(item.rows) for item in taken(queue)) == rows
        assert (await running.features(record, tensors(1))).images == 1
        assert 0 < record.runtime.seconds_per_byte < 30


async def test_rows_without_values_make_a_batch(engine: MakeEngine) -> None:
    """They take nothing, and batches are measured out by what a row takes."""
    async with engine() as running:
        record = await built(running, nodes=["x"])
        taken = record.runtime.sizes.row(((3, 0, 0),)).bytes
        assert taken > 0
        both = job(record.runtime, 2)
        running._queue.put([item(both, range(2), torch.zeros(2, 3, 0, 0), taken)])
        assert (await asyncio.wait_for(both.result(), PATIENCE))["x"].shape == (2, 3, 0, 0)


@pytest.mark.parametrize(("broken", "error"), [("row_bytes", ZeroDivisionError), ("split", OutOfMemory)])
async def test_what_no_batch_can_be_made_of_fails(engine: MakeEngine, broken: str, error: type[Exception]) -> None:
    """Left in the queue, it would end each device thread that comes for it, and nobody else would be answered."""

    def none_left(rows: int) -> tuple[Item, Item]:
        raise MemoryError

    async with engine(max_batch=2) as running:
        record, other = await built(running), await built(running, nodes=["features.3"])
        first, second, third = job(record.runtime, 1), job(record.runtime, 3), job(other.runtime, 1)
        one, three = (item(of, range(of.rows), tensors(*range(of.rows))["x"]) for of in (first, second))
        setattr(three, broken, {"row_bytes": 0, "split": none_left}[broken])
        thread = running._worker._thread
        running._queue.put([one, three, item(third, range(1), tensors(1)["x"])])
        for lost in (first, second):  # the first was in the batch already
            with pytest.raises(error):
                await asyncio.wait_for(lost.result(), PATIENCE)
        assert (await asyncio.wait_for(third.result(), PATIENCE)).keys() == {"features.3"}
        assert running._worker._thread is thread
        assert len(running._queue) == 0
        assert (await running.features(record, tensors(1))).images == 1


async def test_an_output_that_is_the_input_is_not_overwritten(engine: MakeEngine, jpegs: list[bytes]) -> None:
    """A batch is put together in memory that the next one is put together in."""
    async with engine() as running:
        record = await built(running, nodes=["x"])
        watched = Watched(record)
        watched._module = lambda batch: {"x": batch.permute(0, 2, 3, 1)}  # a view, as models without convolutions may
        responses = []
        for pair in (jpegs[:2], jpegs[1:3]):
            watched.entered.clear()
            held = await watched.held(running.features(record, tensors(0)))
            both = asyncio.create_task(running.features(record, pair))
            await waiting(running, 2)
            watched.open.set()
            await held
            responses.append((await both).outputs["x"])
        rows = torch.stack([record.description.preprocessing.pixels(decoded(data)) for data in jpegs])
    for response, pair in zip(responses, (rows[:2], rows[1:3]), strict=True):
        assert torch.equal(response, pair.permute(0, 2, 3, 1))


async def test_rows_of_a_request_that_was_cancelled_do_not_wait_for_a_batch(engine: MakeEngine) -> None:
    """They would hold memory that admission has given to others."""
    async with engine(max_batch=1) as running:
        record = await built(running)
        watched = Watched(record)
        held = await watched.held(running.features(record, tensors(0)))
        left = asyncio.create_task(running.features(record, tensors(1, 2)))
        other = asyncio.create_task(running.features(record, tensors(3)))
        await waiting(running, 2)
        left.cancel()
        await asyncio.wait([left])
        assert len(running._queue) == 1
        watched.open.set()
        assert (await held).images == (await other).images == 1
    assert watched.sizes == [1, 1]
