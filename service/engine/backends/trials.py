"""Comparisons and timings of a lowered extractor against eager, on the device worker, one forward pass at a time.

A pass runs when no request waits or, on a busy service, within a second between two batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fxcore.backends import Lowered
from fxcore.errors import summarize
from service.engine.backends.checks import PassFailed, Reference
from service.engine.device.queue import Queue, usual_size
from service.engine.runtime.candidate import Candidate
from service.problems import NotReady, Problem

T = TypeVar("T")

_SLOWEST_PASS = 0.5
"""Approximate maximum seconds of a timed forward pass: requests wait for it."""

_WARM_SECONDS = 0.25
"""Maximum seconds of a batch to warm up. The first pass of a longer one is barely slower than later ones, and warming
it up would delay the start."""

_ROUNDS = 3
"""Maximum number of timings per batch size; the fastest counts."""

_BURST = 0.05
"""Seconds of forward passes per timing; requests wait for them. On busy cores, decoding threads can make a single short
pass up to four times slower by chance: because of that, mobilenet_v3_small used to stay on eager under immediate load.
"""

_CLEARLY_FASTER = 0.6
"""A candidate below this share of eager's time counts as faster without further rounds, because requests wait during
timings. Its slow first pass is already included."""


class Trials:
    """Runs comparisons and timings. Each method raises ``PassFailed`` if a forward pass raises.

    Args:
        queue: the device worker's queue.
        max_batch: maximum rows of a batch.
    """

    def __init__(self, queue: Queue, max_batch: int) -> None:
        self._queue = queue
        self._max_batch = max_batch

    async def compare(self, candidate: Candidate, reference: Reference, lowered: Lowered) -> None:
        """Compare ``lowered`` with the reference on all photographs, and on another input size."""
        for photographs in reference.batches():
            await self._compare(candidate, reference, lowered, photographs)
        larger = await self._run(reference.expected_larger)
        candidate.any_size = larger is not None and await self._run(reference.agrees, lowered, larger)

    async def compare_one(self, candidate: Candidate, reference: Reference, lowered: Lowered) -> None:
        """Compare ``lowered`` with the reference on the first photograph."""
        await self._compare(candidate, reference, lowered, range(1))

    async def run_once(self, reference: Reference, lowered: Lowered) -> None:
        """Run ``lowered`` on the first photograph."""
        await self._run(reference.timed, lowered, 1)

    async def warm(self, reference: Reference, lowered: Lowered) -> None:
        """Run each batch size once, if it fits in memory and is fast, so that few requests wait for a first pass."""
        single = await self._run(reference.timed, lowered, 1)
        for rows in range(2, self._max_batch + 1):
            if rows == usual_size(rows) and rows * single <= _WARM_SECONDS:
                try:
                    await self._run(reference.timed, lowered, rows)
                except NotReady:  # too little memory
                    return

    async def seconds_per_row(self, reference: Reference, run: Lowered) -> float:
        """Return the seconds per row of ``run`` in a large batch."""
        rows = self._large_batch(await self._run(reference.timed, run, 1))
        return min([await self._run(reference.timed, run, rows) for _ in range(2)]) / rows

    async def race(
        self, reference: Reference, own: Candidate, eager: Lowered, candidate: Candidate, lowered: Lowered
    ) -> bool:
        """Time both at one row and at a full batch, alternating until the result is clear.

        Returns whether the candidate is faster.

        Args:
            own: receives the times of ``eager``.
            candidate: receives the times of ``lowered``.
        """
        rows = 1
        for full in (False, True):
            if full:
                rows = self._large_batch(own.ms["1"] / 1000)
                if rows == 1:
                    break
            for _ in range(_ROUNDS):
                for run, one in ((eager, own), (lowered, candidate)):
                    one.time(rows, await self._run(reference.fastest, run, rows, _BURST))
                if candidate.ms[str(rows)] <= _CLEARLY_FASTER * own.ms[str(rows)]:
                    break
        return candidate.judge(own)

    def _large_batch(self, single: float) -> int:
        """Return the rows of the largest batch to time if one row takes ``single`` seconds."""
        rows = self._max_batch
        while rows > 1 and rows * single > _SLOWEST_PASS:
            rows //= 2
        return rows

    async def _compare(self, candidate: Candidate, reference: Reference, lowered: Lowered, photographs: range) -> None:
        expected = await self._run(reference.expected, photographs)
        candidate.take(await self._run(expected.compare, lowered), reference.precision)

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        try:
            return await asyncio.wrap_future(self._queue.run_idle(lambda: function(*args)))
        except Problem:
            raise
        except Exception as error:
            raise PassFailed(summarize(error)) from error
