"""Rows that would keep the device busy long after their deadline are refused, and no others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from service.engine.requests.admission.admission import Reservation
from service.engine.requests.attributing import Question
from service.engine.runtime import pace as module
from service.engine.runtime.pace import Pace
from service.problems import DeadlineExceeded
from tests.service.engine.running import PATIENCE, MakeEngine, Watched, built, halves, tensors, values_of

SHAPES = ((3, 512, 512),)


def measured(*seconds: float, flops: int = 10**9, rows: int = 1) -> Pace:
    pace = Pace()
    for taken in seconds:
        pace.add(taken, flops, rows)
    return pace


def refused(pace: Pace, flops: float, left: float) -> bool:
    try:
        pace.check(int(flops), left, SHAPES)
    except DeadlineExceeded:
        return True
    return False


@pytest.mark.parametrize(
    ("seconds", "flops", "left", "expected"),
    [
        ((9.0, 9.0, 1.0), 119e9, 60.0, False),  # twice the time left
        ((9.0, 9.0, 1.0), 121e9, 60.0, True),
        ((9.0, 9.0, 7.0, 1.0, 7.0), 119e9, 60.0, False),  # the fastest counts
        ((1.0, 1.0, 1.0), 9e9, -1.0, False),
        ((1.0, 1.0, 1.0), 11e9, -1.0, True),
        ((1.0, 1.0, 1.0), 999e9, math.inf, False),
        ((), 1e18, 0.0, False),
        ((9.0, 9.0), 900e9, 1.0, False),  # these may include compiling
        ((31.0,), 10e9, 60.0, True),  # but not for that long
        ((31.0,), 1e9, 2.0, False),  # a slow start says nothing of the next one
        ((1.0, 1.0, 1.0), 1001e9, 1.0, False),
        ((1.0, 1.0, 1.0), 0, 1.0, False),
    ],
)
def test_what_is_refused(seconds: Sequence[float], flops: float, left: float, expected: bool) -> None:
    assert refused(measured(*seconds), flops, left) is expected


def test_rows_share_the_time_of_their_batch() -> None:
    assert not refused(measured(8.0, 8.0, 8.0, rows=8), 119e9, 60.0)
    assert refused(measured(8.0, 8.0, 8.0, rows=8), 121e9, 60.0)


def test_rows_without_known_flops_are_not_measured() -> None:
    assert not refused(measured(1.0, 1.0, 1.0, flops=0), 1e9, 1.0)


def test_the_refusal_says_what_would_be_right() -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"3 x 512 x 512 would take about 200 s .* 60 s: .*image_size.*X-Request-Timeout"
    ):
        measured(1.0, 1.0, 1.0).check(200 * 10**9, 60.0, SHAPES)


def test_a_row_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would show that the device is no longer as slow as it was once."""
    clock = SimpleNamespace(monotonic=lambda: 1000.0)
    monkeypatch.setattr(module, "time", clock)
    pace = measured(400.0)
    assert refused(pace, 2e9, 60.0)
    clock.monotonic = lambda: 1601.0
    pace.add(0.1, 10**6, 1)  # small rows go on meanwhile
    assert not refused(pace, 2e9, 60.0)
    for _ in range(2):
        pace.add(2.0, 10**9, 1)
    assert not refused(pace, 1e9, 60.0)
    assert refused(pace, 100e9, 60.0)


def sleeping(seconds: float) -> Callable[[torch.Tensor], None]:
    """Return a fault for :class:`Watched`: a batch takes ``seconds`` for each of its rows."""
    return lambda batch: time.sleep(seconds * len(batch))


@pytest.mark.anyio
@pytest.mark.exhaustive
async def test_large_rows_of_a_slow_model_are_refused_before_they_are_computed(engine: MakeEngine) -> None:
    """Once rows of the usual size were measured, for all extractors of the model."""
    large = {"x": torch.zeros(1, 3, 1024, 1024)}
    async with engine() as running:
        record = await built(running)
        watched = Watched(record)

        def soon() -> float:
            return time.monotonic() + 1.0

        assert (await running.features(record, large, deadline=soon())).images == 1  # nothing is known yet
        watched.fault = sleeping(0.1)
        for _ in range(2):
            await running.features(record, tensors(1))
        other = await built(running, nodes=["features.12"], image_size=1024)
        watched_other, computed = Watched(other), len(watched.batches)
        for slow in (record, other):
            with pytest.raises(DeadlineExceeded, match="3 x 1024 x 1024"):
                await running.features(slow, large, deadline=soon())
        assert len(watched.batches) == computed
        assert not watched_other.batches
        assert running.admission.bytes == running.admission.requests == 0
        assert (await running.features(record, tensors(1), deadline=soon())).images == 1
        for deadline in (time.monotonic() + 1000.0, math.inf):
            assert (await running.features(record, large, deadline=deadline)).images == 1
        unmeasured = await built(running, "squeezenet1_1", ["features.12"])
        assert (await running.features(unmeasured, large, deadline=soon())).images == 1


@pytest.mark.anyio
async def test_passes_of_attributions_are_refused(engine: MakeEngine) -> None:
    """A pass forwards and backwards takes three times as long as a pass forwards, and cannot be interrupted."""
    async with engine() as running:
        half, at = await halves(running, "features.8")
        values = values_of(half, rows=1, size=14)
        runtime = await running.runtimes.load(half)
        await running.features(half, values)
        row = runtime.sizes.row(tuple(tuple(value.shape[1:]) for value in values.values()))
        question = Question("gradient", at, 0)
        for seconds, expected in ((3.3, False), (3.4, True)):
            runtime.pace = measured(seconds, seconds, seconds, flops=row.flops)
            with Reservation(running.admission, "client") as reservation:
                asked = running.attribute(half, values, question, reservation, time.monotonic())
                if expected:
                    with pytest.raises(DeadlineExceeded):
                        await asked
                else:
                    assert len((await asked).values) == 1


@pytest.mark.anyio
async def test_the_check_of_a_backend_is_skipped_if_no_request_could_wait_for_it(engine: MakeEngine) -> None:
    """It would hold the device up as the refused request would have."""
    async with engine(request_timeout=1.0) as running:
        record = await built(running)
        Watched(record).fault = sleeping(0.1)
        for _ in range(3):
            await running.features(record, tensors(1))
        large, usual = await built(running, image_size=1024), await built(running, nodes=["features.12"])
        for other in (large, usual):
            await asyncio.wait_for(other.runtime.checked.wait(), PATIENCE)
        assert large.runtime.serving.max_rel_error is None
        assert usual.runtime.serving.max_rel_error is not None
