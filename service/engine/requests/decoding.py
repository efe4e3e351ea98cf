"""Decoding of a request's parts into queued rows, off the event loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from torch import Tensor

from service.engine.device.job import Item, Job
from service.engine.device.queue import Queue
from service.engine.requests.plan.plan import Plan
from service.engine.rows.shapes import RowShape, RowSize
from service.engine.runtime.runtime import Runtime
from service.engine.threads import Decoders

_SMALL_BYTES = 64 * 1024
"""Maximum bytes of a tensor that is converted at once."""


class Decoding:
    """Decodes the parts of a job.

    Each part is queued as soon as it is decoded, so the device does not wait for the last.

    Args:
        plan: the parts.
        job: the job. If parts fail, it fails with the error of the first one, in the order sent.
        queue: receives the rows.
        runtimes: the runtime that computes rows of each shape.
        sizes: predicted sizes of a row of each shape.
        at_once: maximum parts decoded at a time; the request has claimed memory for that many.
        decoders: the threads that decode.
    """

    def __init__(
        self,
        plan: Plan,
        job: Job,
        queue: Queue,
        runtimes: Mapping[RowShape, Runtime],
        sizes: Mapping[RowShape, RowSize],
        at_once: int,
        decoders: Decoders,
    ) -> None:
        self._plan = plan
        self._job = job
        self._queue = queue
        self._runtimes = runtimes
        self._sizes = sizes
        self._at_once = at_once
        self._decoders = decoders
        self._left = deque(range(len(plan.parts)))
        self._guard = threading.Lock()
        self._ended = [False] * len(plan.parts)
        self._failed: dict[int, BaseException] = {}
        self._kept: list[Tensor | None] = [None] * len(plan.parts) if plan.pad is not None else []

    def start(self) -> None:
        """Hand the first parts to the decoders. Each finished part starts the next one, as long as the job is wanted.

        A small tensor is converted on the spot: handing it over would take longer.
        """
        if len(self._left) == 1 and self._plan.decoded <= _SMALL_BYTES and not any(self._plan.costs):
            self._decode(self._left.popleft())
            return
        for _ in range(min(self._at_once, len(self._left))):
            self._start_next()

    def _start_next(self) -> None:
        with suppress(IndexError):  # no parts left
            self._decoders.work.put(partial(self._decode, self._left.popleft()))

    def _decode(self, index: int) -> None:
        if not self._job.wanted():
            return
        try:
            part = self._plan.parts[index]
            tensors = part.decode()
            if self._plan.pad is not None:
                padded = self._padded(index, tensors[0])
                if padded is not None:
                    self._queue.put([padded])
            else:
                self._queue.put([self._item(part.rows, part.shape, tensors)])
            self._end(index)
        except BaseException as error:
            self._end(index, error)
        self._start_next()

    def _end(self, index: int, error: BaseException | None = None) -> None:
        with self._guard:
            self._ended[index] = True
            if error is not None:
                self._failed[index] = error
            if not self._failed:
                return
            first = min(self._failed)
            if all(self._ended[:first]):
                self._job.fail(self._failed[first])
            if not self._job.wanted():
                self._failed.clear()  # their tracebacks hold this object, and with it the images

    def _padded(self, index: int, rows: Tensor) -> Item | None:
        """Return one batch of all parts once the last of them is decoded; until then keep the rows and return None."""
        with self._guard:
            self._kept[index] = rows
            kept = [rows for rows in self._kept if rows is not None]
            if len(kept) < len(self._kept):
                return None
            self._kept = []
        assert self._plan.pad is not None
        padded = self._plan.pad([rows[0] for rows in kept])
        return self._item(range(len(kept)), self._plan.parts[0].shape, (padded,))

    def _item(self, rows: range, shape: RowShape, tensors: tuple[Tensor, ...]) -> Item:
        self._job.queued = time.monotonic()
        size = self._sizes[shape]
        return Item(self._job, self._runtimes[shape], rows, tensors, shape, size.bytes, row_flops=size.flops)
