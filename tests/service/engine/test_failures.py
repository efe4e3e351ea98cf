"""Load, deadlines, clients that leave, and models that fail: each costs the requests it is about and no other."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from service.engine import FeatureOptions
from service.problems import AdmissionFull, ComputeFailed, ExtractorFailed, NotReady, OutOfMemory, RequestTooLarge
from tests.service.engine.running import (
    OUT_OF_MEMORY,
    PATIENCE,
    POISON,
    MakeEngine,
    Watched,
    built,
    failing_on_poison,
    marks,
    spec,
    tensors,
    until,
    waiting,
)

pytestmark = pytest.mark.anyio


async def test_work_of_disconnected_clients_is_dropped(engine: MakeEngine) -> None:
    async with engine(max_batch=8) as running:
        record = await built(running)
        watched = Watched(record)
        first = await watched.held(running.features(record, tensors(0)))
        tasks = [asyncio.create_task(running.features(record, tensors(i))) for i in range(1, 11)]
        await waiting(running, 10)
        left, stayed = [*tasks[:4], *tasks[5:9]], [tasks[4], tasks[9]]
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        assert running.admission.requests == 3
        watched.open.set()
        await asyncio.gather(first, *stayed)
    assert all(task.cancelled() for task in left)
    # Those that stayed share a batch: the others took up no room in one.
    assert [marks(batch) for batch in watched.batches] == [[0], [5, 10]]


@pytest.mark.exhaustive
async def test_a_batch_that_hangs(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(request_timeout=0.5) as running:
        record = await built(running)
        await running.features(record, tensors(0))
        watched = Watched(record)
        held = await watched.held(running.features(record, tensors(1)))
        await until(lambda: not running.readiness()[0])
        assert "has been busy with one batch" in running.readiness()[1]
        with pytest.raises(NotReady, match="has been busy with one batch"):  # at once: it would wait for nothing
            await running.features(record, tensors(2))
        assert running.device_lost() is None  # yet
        monkeypatch.setattr("service.engine.engine.HUNG_SECONDS", 0.0)
        assert "has been busy with one batch" in (running.device_lost() or "")
        watched.open.set()
        await until(lambda: running.readiness()[0])
        assert (await held).images == (await running.features(record, tensors(2))).images == 1


async def test_a_poison_row_fails_its_own_request_only(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running)
        alone = {i: (await running.features(record, tensors(i))).outputs for i in range(7)}
        watched = Watched(record)
        watched.fault = failing_on_poison(ValueError("poison"))
        first = await watched.held(running.features(record, tensors(0)))
        tasks = [asyncio.create_task(running.features(record, tensors(i))) for i in range(5)]
        bad = asyncio.create_task(running.features(record, tensors(5, POISON, 6)))
        await waiting(running, 6)
        watched.open.set()
        for i, task in enumerate(tasks):
            for key, values in (await task).outputs.items():
                assert_close(values, alone[i][key], rtol=1e-5, atol=1e-5)
        with pytest.raises(ComputeFailed, match="ValueError: poison"):
            await bad
        await first
        assert watched.sizes == [1, 8, 3, 5, 1, 4, 1, 3]
        assert (await running.features(record, tensors(1))).images == 1
        assert running.readiness()[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", OUT_OF_MEMORY)
async def test_out_of_memory_halves_the_batch(
    engine: MakeEngine, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """And what keeps log records keeps none of the batch's tensors, which a traceback holds."""
    async with engine() as running:
        record = await built(running)
        expected = (await running.features(record, tensors(*range(6)))).outputs
        watched = Watched(record)
        fits = 2

        def fault(batch: torch.Tensor) -> None:
            if len(batch) > fits:
                raise error

        watched.fault = fault
        response = (await running.features(record, tensors(*range(6)))).outputs
        assert watched.sizes == [6, 3, 1, 2, 3, 1, 2]
        assert not any(record.exc_info for record in caplog.records)
        for key in expected:
            assert_close(response[key], expected[key], rtol=1e-5, atol=1e-5)
        fits = 0
        with pytest.raises(OutOfMemory):
            await running.features(record, tensors(0))
        fits = 9
        assert (await running.features(record, tensors(0))).images == 1


async def test_admission_counts_bytes(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine(max_inflight_bytes=10_000_000) as running:
        record = await built(running, "mobilenet_v3_small")
        watched = Watched(record)
        held = await watched.held(running.features(record, [jpegs[1]]))
        row, response = 3 * 224 * 224, 4 * (48 * 14 * 14 + 576 * 7 * 7)
        decoded = 4 * 400 * 600
        # The image turned, its columns summed as floats of four channels twice, the crop three times, a piece, and the
        # impulses from which the weights are read.
        resized = 4 * 402 * 600 + 2 * 16 * 400 * 224 + 3 * 16 * 224 * 224 + 16 * 2**15 + 4 * 600 * (4 * 600 // 348 + 8)
        assert running.admission.bytes == len(jpegs[1]) + decoded + resized + row + response
        pooled = FeatureOptions(pool="avg")
        with pytest.raises(AdmissionFull, match="bytes"):
            await running.features(record, [jpegs[1]] * 4, pooled)
        with pytest.raises(RequestTooLarge):
            await running.features(record, [jpegs[1]] * 20, pooled)
        watched.open.set()
        await held
        assert (await running.features(record, [jpegs[1]] * 4, pooled)).images == 4
        assert running.admission.bytes == 0


@pytest.mark.exhaustive
async def test_a_flood_gets_one_response_per_request(engine: MakeEngine, jpegs: list[bytes]) -> None:
    """Mixed models, options, clients that leave and bad images, more than may be in: every one has one answer."""
    async with engine(max_inflight=24, max_batch=4) as running:
        records = [await built(running), await built(running, "squeezenet1_1", ["features.3", "features.12"])]
        right = [[(await running.features(r, [jpeg])).outputs for jpeg in jpegs] for r in records]

        async def client(number: int) -> str:
            which, place = number % 2, number % 3
            sent = [jpegs[place][:500]] if number % 11 == 0 else [jpegs[place]]
            try:
                async with asyncio.timeout(0.05 if number % 7 == 0 else PATIENCE):
                    response = (await running.features(records[which], sent)).outputs
            except Exception as error:
                return type(error).__name__
            for key, values in right[which][place].items():
                assert_close(response[key], values, rtol=1e-5, atol=1e-5)
            return "right"

        kinds: list[str] = []
        for start in range(0, 120, 30):
            kinds += await asyncio.gather(*(client(number) for number in range(start, start + 30)))
        assert running.admission.requests == running.admission.bytes == 0
        assert len(running._queue) == 0
    assert set(kinds) <= {"right", "AdmissionFull", "TimeoutError", "BadImage"}
    assert kinds.count("right") >= 40
    assert kinds.count("AdmissionFull") >= 4


async def test_threads(engine: MakeEngine) -> None:
    """One batch uses the compute threads; whoever decodes uses one, so that the two do not fight."""
    seen: list[int] = []
    async with engine(compute_threads=2) as running:
        record = await built(running)
        watched = Watched(record)
        watched.fault = lambda batch: seen.append(torch.get_num_threads())
        await running.features(record, tensors(0))
        seen.append(await running.run_in_encoder(torch.get_num_threads))
        decoded: Future[int] = Future()
        running.threads.decoders.work.put(lambda: decoded.set_result(torch.get_num_threads()))
        seen.append(await asyncio.wrap_future(decoded))
    assert seen == [2, 1, 1]


async def test_oldest_line_first(engine: MakeEngine) -> None:
    order: list[str] = []
    async with engine(max_batch=2) as running:
        running.admission.max_turns = 16
        first = await built(running)
        second = await built(running, nodes=["features.3"])
        watched = {"first": Watched(first), "second": Watched(second)}
        for name, one in watched.items():
            one.fault = lambda batch, name=name: order.append(f"{name} {marks(batch)}")  # type: ignore[misc]
        tasks = [await watched["first"].held(running.features(first, tensors(0)))]
        for number, record in enumerate([first, first, second, first, first, second], 1):
            tasks.append(asyncio.create_task(running.features(record, tensors(number))))
            await waiting(running, number)
        watched["first"].open.set()
        await asyncio.gather(*tasks)
    # A line that is served goes to the back only by the age of what is left in it.
    assert order == ["first [0.0]", "first [1.0, 2.0]", "second [3.0, 6.0]", "first [4.0, 5.0]"]


async def test_batches_have_few_sizes(engine: MakeEngine) -> None:
    """Compilers prepare themselves for each size anew."""
    async with engine(max_batch=12) as running:
        record = await built(running)
        watched = Watched(record)
        tasks = [await watched.held(running.features(record, tensors(0)))]
        for number, rows in enumerate((range(1, 6), range(6, 12)), 1):
            tasks.append(asyncio.create_task(running.features(record, tensors(*rows))))
            await waiting(running, number)
        watched.open.set()
        responses = [(await task).outputs for task in tasks]
    # Eleven rows: of the second request three go with the first, and none is lost or out of order.
    assert [marks(batch) for batch in watched.batches] == [[0], [*range(1, 9)], [*range(9, 12)]]
    assert [len(next(iter(response.values()))) for response in responses] == [1, 5, 6]


async def test_a_large_request_is_computed_in_parts(engine: MakeEngine) -> None:
    async with engine(max_batch=4) as running:
        record = await built(running)
        watched = Watched(record)
        values = tensors(*range(10))
        response = (await running.features(record, values)).outputs
        each = [(await running.features(record, {"x": values["x"][i : i + 1]})).outputs for i in range(10)]
    assert watched.sizes[:3] == [4, 4, 2]
    for key in response:
        assert_close(response[key], torch.cat([one[key] for one in each]), rtol=1e-5, atol=1e-5)


async def test_batches_are_bounded_by_bytes(engine: MakeEngine) -> None:
    async with engine(max_batch_bytes=1_000_000) as running:
        record = await built(running, "mobilenet_v3_small")
        watched = Watched(record)
        await running.features(record, tensors(*range(10)))
        small = max(watched.sizes)
        watched.batches.clear()
        await running.features(record, {"x": torch.zeros(3, 3, 224, 224)})
    assert 1 < small < 10
    assert watched.sizes == [1, 1, 1]


async def test_photographs_that_cannot_be_read_are_no_fault_of_the_request(engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"nope")
    async with engine(calibration_dir=tmp_path) as running:
        record, _ = await running.extractors.get(spec(precision="int8", backend="eager"), PATIENCE)
    assert isinstance(record.problem, ExtractorFailed)
    assert record.problem.status == 500
    assert str(tmp_path) in record.problem.detail
