"""Answers are put together from batches: each row once, in memory of their own, whoever shares a batch."""

import asyncio
import time
from concurrent.futures import Future

import pytest
import torch

from fxcore.images import open_image
from service.engine import ExtractorRecord, FeatureOptions
from service.engine.batching import Item, Job, Queue
from service.engine.errors import NotReady, OutOfMemory
from tests.service.engine.running import MakeEngine, Watched, built, tensors, waiting

pytestmark = pytest.mark.anyio


def job(record: ExtractorRecord, rows: int) -> Job:
    return Job(record, FeatureOptions(), rows, time.monotonic() + 60)


async def test_an_answer_that_cannot_be_put_together_is_lost_alone(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have of the batch is not computed, and so not counted, again: it would pass for rows to come."""

    def none_left(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    async with engine(max_batch=2) as running:
        record = await built(running)
        expected = (await running.features(record, tensors(1))).outputs
        watched = Watched(record)
        whole, lost = job(record, 2), job(record, 2)
        monkeypatch.setattr(lost, "deliver", none_left)
        rows = [(whole, 0, 0.0), (lost, 0, 5.0), (whole, 1, 1.0)]
        running._queue.put([Item(of, range(i, i + 1), (tensors(mark)["x"],), 1) for of, i, mark in rows])
        answer = await whole.answer()
        with pytest.raises(OutOfMemory):
            await lost.answer()
    assert watched.sizes == [2, 1]
    for key, values in expected.items():
        torch.testing.assert_close(answer[key][1:], values, rtol=1e-5, atol=1e-5)


async def test_nothing_is_offered_to_a_worker_that_ends() -> None:
    """It would be dropped, and its request would wait for nothing."""
    queue = Queue(1, 1)
    taken: Future[object] = Future()
    asyncio.get_running_loop().run_in_executor(None, lambda: taken.set_result(queue.take()))
    while not queue._idle:
        await asyncio.sleep(0.01)
    with queue._changed:  # the worker has not noticed yet
        queue.close(NotReady("over"))
        assert queue._idle
        assert not queue.offer(lambda: None)
    assert await asyncio.wrap_future(taken) is None


async def test_an_answer_that_is_the_input_stays_as_it_is(engine: MakeEngine, jpegs: list[bytes]) -> None:
    """A batch is put together in memory that the next one is put together in."""
    async with engine() as running:
        record = await built(running, nodes=["x"])
        watched = Watched(record)
        watched._module = lambda batch: {"x": batch.permute(0, 2, 3, 1)}  # a view, as models without convolutions may
        answers = []
        for pair in (jpegs[:2], jpegs[1:3]):
            watched.entered.clear()
            watched.open.clear()
            held = asyncio.create_task(running.features(record, tensors(0)))
            assert await asyncio.to_thread(watched.entered.wait, 30)
            both = asyncio.create_task(running.features(record, pair))
            await waiting(running, 2)
            watched.open.set()
            await held
            answers.append((await both).outputs["x"])
        rows = torch.stack([record.preprocessing.image(open_image(data)) for data in jpegs]).permute(0, 2, 3, 1)
    assert torch.equal(answers[0], rows[:2])
    assert torch.equal(answers[1], rows[1:3])
