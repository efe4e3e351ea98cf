"""Helpers for the engine's tests."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import PIL.Image
import torch

from service.engine import Engine, ExtractorRecord
from service.engine.options import FeatureResult
from service.engine.runtime.runtime import Runtime
from service.schemas.specs import ExtractorSpec
from service.settings import Settings

MakeEngine = Callable[..., AbstractAsyncContextManager[Engine]]

PATIENCE = 120.0
"""Seconds after which a test stops waiting. A busy machine may take many for what is usually instant."""

POISON = 7777.0
"""The mark of a row that a test's model fails on."""

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    torch.AcceleratorError("CUDA error: out of memory"),
]
"""Errors that torch raises when it runs out of memory."""


def encoded(pixels: np.ndarray, format: str = "JPEG") -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def tensors(*values: float) -> dict[str, torch.Tensor]:
    """Return a small input whose rows are marked by ``values``."""
    return {"x": torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 3, 64, 64).contiguous()}


def marks(batch: torch.Tensor) -> list[float]:
    """Return the marks of the rows of a batch from :func:`tensors`."""
    return batch[:, 0, 0, 0].tolist()


def spec(model: str = "squeezenet1_1", nodes: Any = ("features.8", "features.12"), **rest: Any) -> ExtractorSpec:
    nodes = list(nodes) if isinstance(nodes, tuple) else nodes
    return ExtractorSpec(model=model, return_nodes=nodes, **{"weights": "random", **rest})


async def built(engine: Engine, *args: Any, **rest: Any) -> ExtractorRecord:
    """Build an extractor and return it once it is ready."""
    record, _ = await engine.extractors.get(spec(*args, **rest), PATIENCE)
    assert record.state == "ready", record.problem
    return record


async def halves(engine: Engine, node: str) -> tuple[ExtractorRecord, Any]:
    """Build the half of mobilenet_v3_small that begins at ``node``, and return it with what is told of the node."""
    back = await built(engine, "mobilenet_v3_small", nodes=("classifier",), inputs=[node], backend="eager")
    front = await built(engine, "mobilenet_v3_small", nodes=(node,), backend="eager")
    return back, front.outputs[0]


def values_of(half: ExtractorRecord, rows: int, size: int) -> dict[str, torch.Tensor]:
    """Return random values for the only input of a half, whose maps may be of any size."""
    [begin] = half.description.inputs
    return {begin.name: torch.rand(rows, *(known or size for known in begin.shape[1:]))}


def runtime_alone(*args: Any) -> Runtime:
    """Build an extractor and close its engine, for tests that only inspect the extractor."""

    async def make() -> Runtime:
        engine = Engine(Settings(device="cpu"))
        await engine.start()
        try:
            return await engine.runtimes.load(await built(engine, *args))
        finally:
            await engine.close()

    return asyncio.run(make())


class Watched:
    """A backend that runs the extractor's own module, and records, delays or fails its batches."""

    def __init__(self, record: ExtractorRecord, runtime: Runtime | None = None) -> None:
        runtime = runtime or record.runtime
        assert runtime is not None
        self._module = runtime.run
        self.batches: list[torch.Tensor] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.fault: Callable[[torch.Tensor], None] = lambda batch: None
        runtime.serve(self, runtime.serving)
        runtime.seconds_per_byte = 0.0  # as after a first batch, which has one row

    grown = 0

    def storages(self) -> dict[int, int]:
        return {}

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    def __call__(self, batch: torch.Tensor, *factors: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batches.append(batch.clone())
        self.entered.set()
        assert self.open.wait(PATIENCE)
        self.fault(batch)
        return self._module(batch, *factors)

    async def begun(self) -> None:
        """Wait until a batch has arrived."""
        assert await asyncio.to_thread(self.entered.wait, PATIENCE)

    async def held(self, asked: Coroutine[Any, Any, FeatureResult]) -> asyncio.Task[FeatureResult]:
        """Return the request ``asked`` once its batch has arrived, where it waits until ``open`` is set."""
        self.open.clear()
        request = asyncio.create_task(asked)
        await self.begun()
        return request


def failing_on_poison(error: BaseException) -> Callable[[torch.Tensor], None]:
    """Return a fault for :class:`Watched`: batches with a row that is marked :data:`POISON` raise ``error``."""

    def fault(batch: torch.Tensor) -> None:
        if POISON in marks(batch):
            raise error

    return fault


async def waiting(engine: Engine, items: int) -> None:
    """Wait until at least ``items`` items are queued for the device."""
    await until(lambda: len(engine._queue) >= items)


async def until(true: Callable[[], Any]) -> None:
    """Wait until ``true()`` is true."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.01)
