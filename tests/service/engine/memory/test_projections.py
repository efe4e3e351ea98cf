"""Matrices of projections: made once, and evicted under the memory budget."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fxcore.errors import BadTensor
from fxcore.projection import matrix_bytes, projection_matrix
from service.engine import FeatureOptions
from service.engine.memory import projections
from service.problems import AdmissionFull
from tests.service.engine.running import MakeEngine, built, tensors, until

pytestmark = pytest.mark.anyio


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_graphs")
async def test_requests_share_a_matrix_that_is_counted_and_evicted(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine() as running:
        record = await built(running, nodes=["features.12"])
        before = running.eviction.bytes()
        kept, eviction = running._pipeline._projections, running.eviction
        answers = await asyncio.gather(
            *(running.features(record, tensors(1, 2), FeatureOptions(project=9, seed=seed)) for seed in (0, 0, 1))
        )
        whole = (await running.features(record, tensors(1, 2))).outputs["features.12"].flatten(1)
        for answer, seed in zip(answers, (0, 0, 1), strict=True):
            expected = whole @ projection_matrix(whole.shape[1], 9, seed).to_dense().T
            torch.testing.assert_close(answer.outputs["features.12"], expected, rtol=1e-4, atol=1e-4)
        length = whole.shape[1]
        assert kept.bytes() == 2 * matrix_bytes(length, 9)
        assert eviction.bytes() >= before + kept.bytes()

        monkeypatch.setattr(projections, "BUSY_SECONDS", 0.0)
        first = (await kept.get([length], 9, 0))[length]
        monkeypatch.setattr(eviction, "_memory_budget", eviction.bytes() - 1)
        eviction.make_room()
        assert kept.bytes() == matrix_bytes(length, 9)
        assert record.runtime is not None
        assert (await kept.get([length], 9, 0))[length] is first  # seed 1 was used before it


@pytest.mark.usefixtures("no_graphs")
async def test_matrices_in_use_go_after_what_is_idle(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, nodes=["features.12"])
        await running.features(record, tensors(1), FeatureOptions(project=9))
        kept, eviction = running._pipeline._projections, running.eviction
        eviction._memory_budget = eviction.bytes() - 1
        eviction.make_room()
        assert record.runtime is None
        assert kept.bytes()
        eviction._memory_budget = 0
        eviction.make_room()
        assert not kept.bytes()


@pytest.mark.usefixtures("no_graphs")
async def test_a_new_matrix_evicts_what_is_idle(engine: MakeEngine) -> None:
    """Though no build has to make room for itself."""
    async with engine() as running:
        idle, record = (
            await built(running, "squeezenet1_1", ["features.3"]),
            await built(running, nodes=["features.12"]),
        )
        running.eviction._memory_budget = running.eviction.bytes()
        await running.features(record, tensors(1), FeatureOptions(project=9))
        await until(lambda: idle.runtime is None)
        assert running._pipeline._projections.bytes()


async def test_matrices_too_large_are_refused(engine: MakeEngine) -> None:
    async with engine(memory_budget=4 * (matrix_bytes(10_000, 100) + matrix_bytes(16, 100))) as running:
        kept = running._pipeline._projections
        with pytest.raises(BadTensor, match="project=200 of rows of 10,000 values needs a matrix of"):
            await kept.get([10_000], 200, 0)
        with pytest.raises(BadTensor, match="project=100 of rows of 3 lengths, up to 10,000 values, needs matrices of"):
            await kept.get([16, 4, 10_000], 100, 0)
        assert not kept.bytes()
        assert len((await kept.get([16, 10_000], 100, 0))[16]) == 100


async def test_matrices_being_made_are_limited_together() -> None:
    """Otherwise requests with a seed each fill the memory before anything can be evicted."""
    gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        kept = projections.Projections(torch.device("cpu"), pool, 4 * 2 * matrix_bytes(100, 5), lambda: None)
        pool.submit(gate.wait)
        making = [asyncio.create_task(kept.get([100], 5, seed)) for seed in (0, 1, 1)]
        await asyncio.sleep(0)
        refused = asyncio.create_task(kept.get([100], 5, 2))
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(AdmissionFull, match="2 other projection matrices are being made"):
            await refused
        made = await asyncio.gather(*making)
        assert made[1][100] is made[2][100]
        assert kept.bytes() == 2 * matrix_bytes(100, 5)
        assert len((await kept.get([100], 5, 2))[100]) == 5
