"""The engine on CUDA: memory that runs out, memory that is given back, and many extractors over one model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch

from fxcore import model_graph
from service.engine import Engine
from service.problems import OutOfMemory
from service.settings import Settings
from tests.service.engine.running import built

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.anyio,
]

CUDA = torch.device("cuda", 0)
MiB = 1024**2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def engine(device: str = "cuda", **settings: Any) -> AsyncIterator[Engine]:
    running = Engine(Settings(**{"device": device, "cache_dir": None, "lowering": False, **settings}))
    await running.start()
    try:
        yield running
    finally:
        await running.close(grace=20)


def images(rows: int, side: int = 224) -> dict[str, torch.Tensor]:
    return {"x": torch.rand(rows, 3, side, side, generator=torch.Generator().manual_seed(0))}


@contextmanager
def only(bytes: int) -> Iterator[None]:
    """Of the device's memory this process may take ``bytes`` more than it has."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(CUDA)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(CUDA) + bytes) / total, CUDA)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


async def test_a_batch_that_does_not_fit_is_halved() -> None:
    given = images(32)
    async with engine("cpu") as running:
        record = await built(running, "resnet18", ("layer4",))
        expected = (await running.features(record, given)).outputs["layer4"]
    async with engine(max_batch_bytes=2**40) as running:
        record = await built(running, "resnet18", ("layer4",))
        await running.features(record, images(1))
        with only(120 * MiB):  # a row takes about 10
            found = (await running.features(record, given)).outputs["layer4"]
            assert running.metrics.batch_failures.labels("out_of_memory")._value.get() > 0
            assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
            with pytest.raises(OutOfMemory, match="send a smaller one"):
                await running.features(record, images(1, 4096))
            again = (await running.features(record, images(2))).outputs["layer4"]
        assert (again - expected[:2]).abs().max() < 1e-3 * expected.abs().max()


async def test_fifty_extractors_over_one_model() -> None:
    async with engine(lowering=True) as running:
        nodes = model_graph("resnet50").by_name
        names = [name for name in nodes if name.startswith("layer") and nodes[name].meta["value"].numel() < 10**6][:50]

        async def served(*nodes: str) -> None:
            record = await built(running, "resnet50", nodes)
            await running.features(record, images(32))
            await running.settle(record.runtime)
            await running.features(record, images(32))

        await served(names[0], names[-1])  # the largest values, and all layers
        torch.cuda.empty_cache()
        one = torch.cuda.memory_reserved(CUDA)
        for name in names[1:]:
            await served(name)
        assert len(running.records.list()) == len(names) == 50
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(CUDA) <= 1.3 * one


async def test_evicted_weights_are_given_back() -> None:
    async with engine(memory_budget=900 * MiB) as running:
        record = await built(running, "vgg11", ("features.20",))  # 507 MiB of weights
        await running.features(record, images(1))
        before = torch.cuda.memory_reserved(CUDA)
        other = await built(running, "vgg13", ("features.20",))
        await running.features(other, images(1))
        assert record.runtime is None
        for _ in range(100):
            if torch.cuda.memory_reserved(CUDA) < before + 100 * MiB:
                break
            await asyncio.sleep(0.1)
        assert torch.cuda.memory_reserved(CUDA) < before + 100 * MiB
        again = await running.features(record, images(1))
        assert again.outputs["features.20"].isfinite().all()


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
async def test_auto_takes_cuda_graphs(precision: str) -> None:
    given = images(3)
    async with engine("cpu") as running:
        record = await built(running, "resnet18", ("layer4",))
        expected = (await running.features(record, given)).outputs["layer4"]
    async with engine(lowering=True) as running:
        record = await built(running, "resnet18", ("layer4",), precision=precision)
        await running.features(record, given)
        await running.settle(record.runtime)
        assert record.runtime.backend == "cudagraphs", record.runtime.candidates
        found = (await running.features(record, given)).outputs["layer4"].float()
        other = (await running.features(record, images(3, 160))).outputs["layer4"]
    if precision == "float32":
        assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.999
    assert other.shape == (3, 512, 5, 5)
