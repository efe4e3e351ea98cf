"""The way of one request from its encoded parts into the queue, without a detour over the event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from service.engine.batching import Item, Job, Queue
from service.engine.inputs import Plan, RowShape, grouped


class Decoding:
    """Decodes the parts of a job; whichever thread ends the last part queues the rows.

    Args:
        plan: the parts.
        job: told if a part fails; of several that fail, of the first in the order sent.
        queue: where the rows go.
        row_bytes: what a row of each shape takes while it is computed.
    """

    def __init__(self, plan: Plan, job: Job, queue: Queue, row_bytes: Mapping[RowShape, int]) -> None:
        self._plan = plan
        self._job = job
        self._queue = queue
        self._row_bytes = row_bytes
        self._decoded: list[tuple[Tensor, ...] | BaseException | None] = [None] * len(plan.parts)
        self._missing = len(plan.parts)
        self._guard = threading.Lock()
        self._waiting: list[Future[None]] = []

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Hand all parts to ``pool``."""
        self._waiting = [pool.submit(self._decode, index) for index in range(len(self._decoded))]

    def cancel(self) -> None:
        """Drop the parts that have not begun; for a job that is not wanted any more."""
        for part in self._waiting:
            part.cancel()

    def _decode(self, index: int) -> None:
        try:
            decoded: tuple[Tensor, ...] | BaseException | None = None
            if self._job.wanted():
                decoded = self._plan.parts[index]()
        except BaseException as error:  # of another thread's business; whoever waits for the job is told
            decoded = error
        with self._guard:
            self._decoded[index] = decoded
            self._missing -= 1
            if self._missing:
                return
        try:
            self._put()
        except BaseException as error:
            self._job.fail(error)

    def _put(self) -> None:
        """Queue what was decoded, and keep nothing of it."""
        parts: list[tuple[Tensor, ...]] = []
        decoded, self._decoded = self._decoded, []
        for part in decoded:
            if isinstance(part, BaseException):
                self._job.fail(part)
                return
            if part is None:
                return
            parts.append(part)
        usual = max(self._row_bytes.values())
        items = [
            Item(self._job, rows, tensors, self._row_bytes.get(tuple(tuple(t.shape[1:]) for t in tensors), usual))
            for rows, tensors in grouped(self._plan, parts)
        ]
        self._job.queued = time.monotonic()
        self._queue.put(items)
