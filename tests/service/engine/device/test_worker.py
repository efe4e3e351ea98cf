"""The thread that runs models: what ends it, and who goes on."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
import torch
from torch.testing import assert_close

from service.engine import FeatureOptions
from service.engine.device.job import Job
from service.problems import ComputeFailed, NotReady
from tests.service.engine.running import (
    POISON,
    MakeEngine,
    Watched,
    built,
    failing_on_poison,
    marks,
    tensors,
    until,
    waiting,
)

pytestmark = pytest.mark.anyio


async def test_a_device_thread_that_dies_is_replaced(engine: MakeEngine) -> None:
    """Its batch is told; what waited is computed by the next one, by which the thread's own settings are kept."""
    async with engine(max_batch=1, compute_threads=2) as running:
        record = await built(running)
        expected = [(await running.features(record, tensors(i))).outputs for i in range(3)]
        watched = Watched(record)
        seen = []

        def fault(batch: torch.Tensor) -> None:
            if POISON in marks(batch):
                raise SystemExit("gone")
            seen.append((threading.current_thread(), torch.get_num_threads()))

        watched.fault = fault
        poison = await watched.held(running.features(record, tensors(POISON)))
        others = [asyncio.create_task(running.features(record, tensors(i))) for i in range(3)]
        await waiting(running, 3)
        first = running._worker._thread
        watched.open.set()
        with pytest.raises(NotReady, match="the device worker died of SystemExit: gone") as caught:
            await poison
        assert caught.value.retry_after == 1
        for number, task in enumerate(others):
            for key, values in (await task).outputs.items():
                assert_close(values, expected[number][key], rtol=1e-5, atol=1e-5)
        assert [threads for _, threads in seen] == [2, 2, 2]
        assert len({thread for thread, _ in seen}) == 1
        assert seen[0][0] is not first
        assert running.readiness()[0]
        assert running.admission.requests == 0
        text = running.metrics.text().decode()
        assert "fxserve_worker_restarts_total 1.0" in text


async def test_two_device_threads_that_die_at_once_are_replaced_in_order(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second may die before the first knows that it has started it."""
    start = threading.Thread.start
    died: list[threading.Thread] = []

    def slow_once(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "fxserve-cpu":
            died.append(threading.current_thread())
            time.sleep(0.5 if len(died) == 1 else 0)

    async with engine(max_batch=1) as running:
        record = await built(running)
        watched = Watched(record)
        watched.fault = failing_on_poison(SystemExit("gone"))
        watched.open.clear()
        poison = [asyncio.create_task(running.features(record, tensors(POISON))) for _ in range(2)]
        await waiting(running, 1)
        monkeypatch.setattr(threading.Thread, "start", slow_once)
        watched.open.set()
        for task in poison:
            with pytest.raises(NotReady, match="SystemExit: gone"):
                await task
        await until(lambda: len(died) == 2)
        for thread in died:
            await asyncio.to_thread(thread.join)
        assert running.readiness()[0], running.readiness()
        assert (await running.features(record, tensors(0))).images == 1


async def test_a_device_thread_that_cannot_begin_is_not_replaced_without_end(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the device is gone by the time that another thread asks for it."""
    asked = []

    def refuse(device: torch.device, threads: int) -> None:
        asked.append(threading.current_thread())
        if len(asked) > 20:  # the test ends, at least
            threading.Event().wait(10)
        raise RuntimeError("no such device")

    async with engine(max_batch=1) as running:
        record = await built(running)
        watched = Watched(record)
        watched.fault = failing_on_poison(SystemExit("gone"))
        poison = await watched.held(running.features(record, tensors(POISON)))
        other = asyncio.create_task(running.features(record, tensors(1)))
        await waiting(running, 1)
        monkeypatch.setattr("service.engine.device.worker.compute_on", refuse)
        watched.open.set()
        with pytest.raises(NotReady, match="the device worker died of SystemExit: gone"):
            await poison
        with pytest.raises(NotReady, match="the device worker died of RuntimeError: no such device"):
            await other
        ready, why = running.readiness()
        assert not ready
        assert "no such device" in why
        with pytest.raises(NotReady, match="no such device"):
            await running.features(record, tensors(1))
        assert len(asked) == 1
        assert running.admission.requests == 0


class Lost(RuntimeError):
    pass


def lose(batch: torch.Tensor) -> None:
    raise Lost("CUDA error: an illegal memory access was encountered")


async def test_a_lost_device_fails_every_request(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access a CUDA context answers every call with the same error: nothing can go on in it."""
    monkeypatch.setattr("service.engine.device.worker._DEVICE_LOST", Lost)
    async with engine() as running:
        record = await built(running)
        Watched(record).fault = lose
        for _ in range(2):
            with pytest.raises(NotReady, match="the device worker died of Lost: CUDA error"):
                await running.features(record, tensors(0))
        ready, why = running.readiness()
        assert not ready
        assert "illegal memory access" in why
        assert running.device_lost() == why
        assert running.admission.requests == 0


async def test_a_device_lost_between_requests_is_noticed(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.device.worker._DEVICE_LOST", Lost)
    async with engine() as running:
        record = await built(running)
        Watched(record).fault = lose
        with pytest.raises(Lost):
            await running.profile(record.runtime)
        await until(lambda: running.device_lost() is not None)
        with pytest.raises(NotReady, match="illegal memory access"):
            await running.features(record, tensors(0))


async def test_an_error_that_leaves_the_device_usable_fails_its_request_only(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports a kernel that it could not start in the same way as an illegal access."""
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)  # that it answers
    async with engine() as running:
        record = await built(running)
        Watched(record).fault = failing_on_poison(torch.AcceleratorError("CUDA error: invalid configuration argument"))
        with pytest.raises(ComputeFailed, match="invalid configuration argument"):
            await running.features(record, tensors(POISON))
        assert (await running.features(record, tensors(0))).images == 1
        assert running.readiness()[0]


async def test_rows_are_delivered_once(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the outputs of one request of a batch cannot be split, the others have theirs already."""
    output_rows = Job.output_rows

    def fails_where_pooled(job: Job, rows: range) -> range:
        if job.options.pool == "avg":
            raise RuntimeError("no pieces")
        return output_rows(job, rows)

    async with engine() as running:
        record = await built(running)
        expected = (await running.features(record, tensors(1))).outputs
        watched = Watched(record)
        first = await watched.held(running.features(record, tensors(0)))
        monkeypatch.setattr(Job, "output_rows", fails_where_pooled)
        plain = asyncio.create_task(running.features(record, tensors(1)))
        await waiting(running, 1)
        pooled = asyncio.create_task(running.features(record, tensors(2), FeatureOptions(pool="avg")))
        await waiting(running, 2)
        watched.open.set()
        await first
        with pytest.raises(ComputeFailed, match="RuntimeError: no pieces"):
            await pooled
        for key, values in (await plain).outputs.items():
            assert_close(values, expected[key], rtol=1e-5, atol=1e-5)
        assert watched.sizes == [1, 2]


async def test_a_failed_task_holds_no_memory(engine: MakeEngine) -> None:
    """Its traceback would hold what it computed until the next task."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def failing() -> None:
        value = torch.ones(3)
        alive.append(weakref.ref(value))
        raise ValueError("no")

    async with engine() as running:
        record = await built(running)
        await record.runtime.checked.wait()  # another task would replace what is held
        with pytest.raises(ValueError, match="no"):
            await asyncio.wrap_future(running._queue.run_idle(failing))
        await running.features(record, tensors(0))
        gc.collect()
        assert alive[0]() is None
