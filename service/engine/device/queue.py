"""The queue of the device worker, and the formation of batches from it.

A :class:`Job` is one request. Its rows (images, or rows of tensors) are queued as :class:`Item`\\ s of one shape each.
:class:`Queue` keeps a queue per (extractor, shape, dtype). Whenever the device is free, it picks the queue whose first
item has waited longest, less the seconds that its job has already been computed for, and hands out the largest batch of
it. So a request of many shapes, with one batch per shape, does not hold up later requests.

Batches are never shared between extractors, even of the same model: separate batches are faster than one over the union
of their nodes (``benchmarks/results``). The union would compute every node for every row, and would have to be lowered
and checked for each combination of extractors. Extractors of one model do share its weights.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

from service.engine.device.job import Item, Job
from service.engine.errors import as_exception
from service.engine.runtime.pace import LONGEST_SECONDS
from service.problems import NotReady

T = TypeVar("T")

_DTYPE = attrgetter("dtype")


class BackgroundTask:
    """Other work for the device worker, run when no batch waits or once it has waited ``max_wait`` seconds.

    Args:
        function: the function to run.
        max_wait: seconds after which it runs before waiting batches.
    """

    def __init__(self, function: Callable[[], Any], max_wait: float) -> None:
        self.future: Future[Any] = Future()
        self.latest = time.monotonic() + max_wait
        self._function = function

    def run(self) -> BaseException | None:
        """Run it, set its result or exception on ``future``, and return the exception, or None."""
        if not self.future.set_running_or_notify_cancel():
            return None
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(as_exception(error))
            return error
        self.future.set_result(result)
        return None


class Queue:
    """Waiting items, in one queue per key. Thread-safe.

    Args:
        max_rows: maximum rows in a batch.
        max_bytes: maximum predicted bytes in a batch, unless a single row needs more.
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self._queues: dict[Hashable, deque[Item]] = {}
        self._tasks: deque[BackgroundTask] = deque()
        self._task_was_last = False
        self._changed = threading.Condition()
        self._closed: NotReady | None = None

    def put(self, items: Sequence[Item]) -> None:
        """Queue items. After :meth:`close` their jobs fail at once."""
        with self._changed:
            if self._closed is None:
                for item in items:
                    key = item.runtime, item.shape, tuple(map(_DTYPE, item.inputs))
                    self._queues.setdefault(key, deque()).append(item)
                self._changed.notify()
                return
        for item in items:
            item.job.fail(self._closed)

    def run_idle(self, function: Callable[[], T], max_wait: float = 1.0) -> Future[T]:
        """Schedule ``function`` on the worker when no batch waits, or after ``max_wait`` seconds between two batches.

        Overdue tasks alternate with batches, so that they cannot starve requests.
        """
        task = BackgroundTask(function, max_wait)
        with self._changed:
            if self._closed is None:
                self._tasks.append(task)
                self._changed.notify()
            else:
                task.future.set_exception(self._closed)
        return task.future

    def take(self) -> list[Item] | BackgroundTask | None:
        """Wait for and return the next work; None once the queue is closed.

        A batch has the largest :func:`usual_size` that fits, and comes from the queue chosen as the module's docstring
        describes. Items whose job is no longer wanted are dropped here.
        """
        with self._changed:
            while self._closed is None:
                work = self._next()
                if work is not None:
                    return work
                self._changed.wait()
            return None

    def discard(self, job: Job) -> None:
        """Drop the waiting items of ``job``, and with them their memory."""
        with self._changed:
            for key, queue in list(self._queues.items()):
                self._queues[key] = deque(item for item in queue if item.job is not job)
                if not self._queues[key]:
                    del self._queues[key]

    def close(self, reason: NotReady) -> None:
        """Fail all waiting and all future work with ``reason``."""
        with self._changed:
            self._closed = reason
            waiting = [item for queue in self._queues.values() for item in queue]
            self._queues.clear()
            tasks, self._tasks = self._tasks, deque()
            self._changed.notify_all()
        for task in tasks:
            with suppress(InvalidStateError):
                task.future.set_exception(reason)
        for item in waiting:
            item.job.fail(reason)

    def __len__(self) -> int:
        """Return the number of waiting items."""
        with self._changed:
            return sum(map(len, self._queues.values()))

    def _next(self) -> list[Item] | BackgroundTask | None:
        task = min(self._tasks, key=lambda task: task.latest, default=None)
        if task is not None and task.latest < time.monotonic() and not self._task_was_last:
            self._tasks.remove(task)
            self._task_was_last = True
            return task
        self._task_was_last = False
        while self._queues:
            key, queue = min(self._queues.items(), key=_due)
            batch: list[Item] = []
            try:
                self._form(batch, queue)
            except BaseException as error:  # retrying would fail again
                for item in (*batch, *queue):
                    item.job.fail(error)
                batch.clear()
                queue.clear()
            if not queue:
                del self._queues[key]
            if batch:
                return batch
        if task is not None:
            self._tasks.remove(task)
            self._task_was_last = True
        return task

    def _form(self, batch: list[Item], queue: deque[Item]) -> None:
        """Move a batch from ``queue`` to ``batch``. At any time, each item is in one of them."""
        rows = 0
        while queue:
            item = queue[0]
            if not item.job.wanted():
                queue.popleft()
                continue
            room = self._most(item) - rows
            if room <= 0:
                break
            if len(item.rows) > room:
                item, queue[0] = item.split(room)
            else:
                queue.popleft()
            batch.append(item)
            rows += len(item.rows)
        excess = rows - usual_size(rows)
        while excess:
            item = batch[-1]
            if len(item.rows) > excess:
                batch[-1], item = item.split(len(item.rows) - excess)
            else:
                batch.pop()
            queue.appendleft(item)
            excess -= len(item.rows)

    def _most(self, item: Item) -> int:
        """Return the maximum rows of a batch of rows like those of ``item``."""
        seconds_per_byte = item.runtime.seconds_per_byte
        if seconds_per_byte is None or not item.runtime.description.entry.batch:
            return 1
        of_row = seconds_per_byte * item.row_bytes
        fit = min(self.max_bytes // item.row_bytes, int(LONGEST_SECONDS / max(of_row, 1e-9)))
        return max(1, min(self.max_rows, fit))


def _due(waiting: tuple[Hashable, deque[Item]]) -> float:
    """Return the time the first item of a queue was queued plus the seconds its job has been computed for.

    It grows only while the job is served, so that a stream of later requests cannot starve the rest of the job.
    """
    item = waiting[1][0]
    return item.since + item.job.computed


def usual_size(rows: int) -> int:
    """Return the size of the largest batch formed from ``rows`` rows: a power of two, or three times a power of two.

    Compilers and CUDA graphs prepare for each batch size, so the first batch of a size is slow. There are only ten such
    sizes up to 32.
    """
    power = 1 << (rows.bit_length() - 1) if rows else 0
    return power + power // 2 if rows >= power + power // 2 else power
