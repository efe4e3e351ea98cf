"""From a request's encoded parts to rows in the queue, without the event loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from service.engine.device.job import Item, Job
from service.engine.device.queue import Queue, Undecoded
from service.engine.device.threads import decode_only
from service.engine.requests.plan import Plan
from service.engine.rows import RowShape

log = logging.getLogger("fxserve.decoding")

_SOON_DECODED = 12 * 1024**2
"""Most bytes of a part that the device worker decodes itself; two megapixels take it 10 ms."""


class Decoders:
    """Threads that decode, first come, first served.

    They are no executor, because nobody waits for a part: making, locking and settling a future for each took a tenth
    of the event loop's time.
    """

    def __init__(self, threads: int) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._main, name=f"fxserve-decode-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, decode: Callable[[], None]) -> None:
        """Have one of the threads call ``decode``."""
        self._work.put(decode)

    def stop(self) -> None:
        """End the threads, once what was put before is done."""
        for _ in self._threads:
            self._work.put(None)

    def _main(self) -> None:
        decode_only()
        while (decode := self._work.get()) is not None:
            try:
                decode()
            except BaseException:  # nobody may wait in vain because one part went wrong
                log.exception("a decoder failed")
            del decode  # an idle thread holds nobody's images


class Decoding:
    """Decodes the parts of a job. Each is queued as soon as it is ready, so that the device need not wait for the last.

    Args:
        plan: the parts.
        job: told if a part fails; of several that fail, of the first in the order sent.
        queue: where the rows go.
        row_bytes: what a row of each shape takes while it is computed.
        at_once: most parts that are decoded at a time, whose memory the request has claimed.
    """

    def __init__(self, plan: Plan, job: Job, queue: Queue, row_bytes: Mapping[RowShape, int], at_once: int = 1) -> None:
        self._plan = plan
        self._job = job
        self._queue = queue
        self._row_bytes = row_bytes
        self._at_once = at_once
        self._left = deque(range(len(plan.parts)))
        self._guard = threading.Lock()
        self._ended = [False] * len(plan.parts)
        self._failed: dict[int, BaseException] = {}
        self._kept: list[Tensor | None] = [None] * len(plan.parts) if plan.pad is not None else []

    def start(self, decoders: Decoders) -> None:
        """Hand the first parts to ``decoders``; each that ends hands on another, until nobody wants the job any more.

        The device worker decodes the first part if it has nothing else to do and that is not long: it would wait for
        it anyway, and going from one thread to another takes a quarter of what decoding a photograph does.
        """
        first = [self._left.popleft() for _ in range(min(self._at_once, len(self._left)))]
        for index in first:
            part = partial(self._decode, index, decoders)
            if index or self._plan.costs[0] > _SOON_DECODED or not self._queue.offer(Undecoded(self._job, part)):
                decoders.put(partial(part, self._queue.put))

    def _decode(self, index: int, decoders: Decoders, hand_on: Callable[[Sequence[Item]], object]) -> None:
        if not self._job.wanted():
            return
        error: BaseException | None = None
        try:
            rows, decode = self._plan.parts[index]
            tensors = decode()
            if self._plan.pad is not None:
                padded = self._padded(index, tensors[0])
                if padded is not None:
                    hand_on([padded])
            else:
                hand_on([self._item(rows, tensors)])
        except BaseException as raised:  # whoever waits for the job is told
            error = raised
        self._end(index, error)
        with suppress(IndexError):  # it was the last
            decoders.put(partial(self._decode, self._left.popleft(), decoders, self._queue.put))

    def _end(self, index: int, error: BaseException | None) -> None:
        with self._guard:
            self._ended[index] = True
            if error is not None:
                self._failed[index] = error
            if not self._failed:
                return
            first = min(self._failed)
            known = all(self._ended[:first])
        if known:
            self._job.fail(self._failed[first])

    def _padded(self, index: int, rows: Tensor) -> Item | None:
        """One batch of all parts, made of the last of them; the others are kept for it."""
        with self._guard:
            self._kept[index] = rows
            kept = [rows for rows in self._kept if rows is not None]
            if len(kept) < len(self._kept):
                return None
            self._kept = []
        assert self._plan.pad is not None
        return self._item(range(len(self._plan.shapes)), (self._plan.pad([rows[0] for rows in kept]),))

    def _item(self, rows: range, tensors: tuple[Tensor, ...]) -> Item:
        self._job.queued = time.monotonic()
        return Item(self._job, rows, tensors, self._row_bytes[self._plan.shapes[rows.start]])
