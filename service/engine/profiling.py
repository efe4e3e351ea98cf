"""Where an extractor's time and memory go, measured between its requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from fxcore.extractor import Extractor
from fxcore.photos import check_rows, photos
from fxcore.profile import Profile, Profiler

if TYPE_CHECKING:
    from service.engine.batching import Queue
    from service.engine.records import ExtractorRecord

PROFILE_RUNS = 5
"""Runs that the medians are over."""


async def profiled(record: ExtractorRecord, extractor: Extractor, queue: Queue) -> Profile:
    """Profile what ``record`` runs in eager on a photograph.

    On the device worker, so that nothing else computes meanwhile; a run at a time, when nothing waits or after a second
    between two batches, so that requests wait for one run at most.

    Args:
        queue: the device worker's.
    """

    def prepare() -> Profiler:
        rows = check_rows(record.preprocessing, record.inputs, photos()[:1], record.preprocessing.nominal_size())
        return Profiler(extractor.module, [x.to(torch.device(record.device), record.dtype) for x in rows[0]])

    profiler = await asyncio.to_thread(prepare)
    for run in range(1 + PROFILE_RUNS):
        await asyncio.wrap_future(queue.errand(lambda counts=run > 0: profiler.run(counts=counts)))  # type: ignore[misc]
    return profiler.result()
