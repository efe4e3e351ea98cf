"""Profiles of an extractor's time and memory, measured between requests."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass

from fxcore.analysis.profile import Profile, Profiler
from fxcore.tensors import dtype_name
from service.engine.backends.checks import Inputs, check_photographs, timed
from service.engine.backends.int8_advice import int8_graph
from service.engine.device.queue import Queue
from service.engine.runtime.runtime import Runtime

PROFILE_RUNS = 5
"""Number of measured runs; medians are reported."""


@dataclass(frozen=True)
class Measured:
    """A profile of an extractor's graph, and the time of the backend that serves.

    Attributes:
        profile: profile of the graph as torch.fx runs it, node by node.
        precision: precision of that graph: int8 if eager serves int8, otherwise the extractor's float dtype. The
            serving backend may run something else, such as a graph with folded batch norms.
        backend: the serving backend.
        milliseconds: median time of ``backend`` for the same photograph.
    """

    profile: Profile
    precision: str
    backend: str
    milliseconds: float


async def profiled(runtime: Runtime, queue: Queue) -> Measured:
    """Profile ``runtime`` on a photograph: its int8 graph if eager serves one, otherwise the extractor in eager.

    Each run is a separate task of the device worker, so nothing else computes at the same time, and requests wait for
    at most one run. A task runs when no request waits, or after one second between two batches.

    Args:
        queue: the device worker's queue.
    """

    serving, backend, int8 = runtime.run, runtime.backend, int8_graph(runtime.run)
    description, extractor = runtime.description, runtime.extractor

    def prepare() -> tuple[Profiler, Inputs]:
        [inputs] = check_photographs(description, extractor, 1)
        return Profiler(int8 or extractor.module, inputs), inputs

    profiler, inputs = await asyncio.to_thread(prepare)
    taken = []
    for run in range(1 + PROFILE_RUNS):
        await asyncio.wrap_future(queue.run_idle(lambda counts=run > 0: profiler.run(counts=counts)))  # type: ignore[misc]
        seconds = await asyncio.wrap_future(queue.run_idle(lambda: timed(serving, inputs)))
        taken += [1000 * seconds] if run else []
    precision = "int8" if int8 is not None else dtype_name(extractor.dtype)
    return Measured(profiler.result(), precision, backend, statistics.median(taken))
