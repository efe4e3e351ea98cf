"""The one thread that runs models on a device.

It takes a batch whenever it is free, so an idle server adds no delay, and on a busy one batches fill up by themselves.
If a batch fails, as few of its requests as possible fail.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fxcore.edits import stacked
from fxcore.errors import BadTensor, summarize
from service.engine.device.job import Item, announce, overflow
from service.engine.device.outputs import Finished, by_options, deliveries, finish
from service.engine.device.queue import BackgroundTask, Queue
from service.engine.device.staging import Staging
from service.engine.errors import failure, is_out_of_memory
from service.engine.rows.shapes import by_image
from service.engine.threads import compute_on
from service.observability.metrics import Metrics
from service.problems import NotReady, OutOfMemory, Problem

log = logging.getLogger("fxserve.worker")

# A CUDA context that has seen an illegal access answers every later call with the same error.
_DEVICE_LOST: type[BaseException] = torch.AcceleratorError

_FULL_COLLECTION_EVERY = 10.0
"""Minimum seconds between two full garbage collections."""

_VALUES_EACH = 64 * 1024
"""Tensor values per thread that make torch use all its threads: it gives each at least 32,768."""


class DeviceWorker:
    """Runs the work of ``queue`` on ``device`` until :meth:`stop`.

    Args:
        device: the device of the extractors' modules.
        queue: the source of batches.
        threads: number of CPU threads for one batch.
        metrics: counts batches.

    Attributes:
        lost: why this process can no longer use the device; None while it can.
    """

    def __init__(self, device: torch.device, queue: Queue, threads: int, metrics: Metrics) -> None:
        self.device = device
        self._metrics = metrics
        self._queue = queue
        self._threads = threads
        self._staging = Staging(device)
        self._busy_since: float | None = None
        self.lost: str | None = None
        self._batch: Sequence[Item] = ()
        self._collected = -math.inf
        self._thread = self._fresh_thread()
        self._replacing = threading.Lock()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Stop the thread once its current batch is done. Waiting work fails."""
        self._queue.close(NotReady("the device worker was stopped"))
        if self._thread.is_alive():
            self._thread.join(timeout)

    def abandon(self, reason: NotReady) -> None:
        """Fail the requests of the current batch with ``reason``; its results are dropped."""
        for item in self._batch:
            item.job.fail(reason)

    def trouble(self, longest_batch: float) -> str | None:
        """Return why the worker does not work; None if it does.

        Its device is lost, its thread is dead, or it has been on one batch for over ``longest_batch`` seconds.
        """
        if self.lost is not None:
            return self.lost
        if not self._thread.is_alive():
            return "the device worker is not running"
        return self.hang(longest_batch)

    def hang(self, longest_batch: float) -> str | None:
        """Return a message if the thread has been on one batch for over ``longest_batch`` seconds; otherwise None.

        A hanging thread cannot be stopped from outside, and a second one would find the device busy.
        """
        busy_since = self._busy_since
        if busy_since is not None and (busy := time.monotonic() - busy_since) > longest_batch:
            return f"the device worker has been busy with one batch for {busy:.0f} s"
        return None

    def _fresh_thread(self) -> threading.Thread:
        return threading.Thread(target=self._main, name=f"fxserve-{self.device}", daemon=True)

    def _main(self) -> None:
        began = False
        try:
            compute_on(self.device, self._threads)
            # Start this thread's OpenMP threads now: OpenMP ends the process if it cannot start one later.
            torch.zeros(self._threads * _VALUES_EACH).add_(1)
            began = True
            self._work()
        except BaseException as error:  # whatever the reason, its requests must be answered
            log.exception("the device worker died")
            self._die(error, lost=not began or isinstance(error, _DEVICE_LOST))

    def _work(self) -> None:
        work: Sequence[Item] | BackgroundTask | None
        while (work := self._queue.take()) is not None:
            self._busy_since = time.monotonic()
            if isinstance(work, BackgroundTask):
                error = work.run()
                if error is not None and self._is_lost(error):
                    raise error
                error = None  # its traceback holds the task's tensors
            else:
                self._batch = work
                self._serve(work)
            self._busy_since = None
            self._batch = work = ()  # so that an idle worker holds no tensors

    def _die(self, error: BaseException, lost: bool) -> None:
        """Fail the current batch and, unless the device is ``lost``, start another thread for the waiting work.

        The device also counts as lost if a thread could not even begin: the next one could not either.
        """
        why = f"the device worker died of {summarize(error)}"
        batch, self._batch, self._busy_since = self._batch, (), None
        for item in batch:
            item.job.fail(NotReady(why, retry_after=1.0))
        if not lost:
            with self._replacing:  # the new thread may die, and be replaced, before it is assigned here
                try:
                    fresh = self._fresh_thread()
                    fresh.start()
                    self._thread = fresh
                    self._metrics.worker_restarts.inc()
                    return
                except RuntimeError as none:  # the system cannot start a thread
                    why = f"{why}, and {none}"
        self.lost = why
        self._queue.close(NotReady(why))

    def _serve(self, items: Sequence[Item]) -> None:
        """Compute a batch. If it fails, halve it until the failing rows are isolated."""
        error: BaseException | None = None
        finished: list[Finished] = []
        borrowed = False
        try:
            finished, borrowed = self._compute(items)
        except _DEVICE_LOST as lost:
            if self._is_lost(lost):
                raise
            error = lost.with_traceback(None)
        except Exception as raised:
            # The traceback, which log handlers may keep, holds every tensor of the failed forward pass. Drop it when
            # memory is short. Errors for the client need none.
            found = items[0].runtime.failure(raised, items[0].shape)
            traced = not (is_out_of_memory(raised) or isinstance(found, BadTensor))
            log.warning("a batch of %d rows failed: %s", _rows(items), summarize(raised), exc_info=traced)
            error = raised.with_traceback(None)
        if error is None:
            # Outside the try block: once a row is delivered, its batch must not be computed again.
            for group in finished:
                _deliver(group, borrowed)
            self._metrics.batch_size.observe(_rows(items))  # last: requests do not wait for it
            return
        out_of_memory = is_out_of_memory(error)
        self._metrics.batch_failures.labels("out_of_memory" if out_of_memory else "error").inc()
        if out_of_memory:
            error.__context__ = None
            self._free()
        halves: tuple[Sequence[Item], Sequence[Item]]
        if out_of_memory and _rows(items) > 1:
            halves = _halved(items)
        elif len(items) > 1 and not out_of_memory:
            halves = (items[: len(items) // 2], items[len(items) // 2 :])
        else:
            [item] = items
            item.job.fail(_error_for(error) if out_of_memory else item.runtime.failure(error, item.shape))
            return
        for half in halves:
            if wanted := [item for item in half if item.job.wanted()]:
                self._serve(wanted)

    def _is_lost(self, error: BaseException) -> bool:
        """Return whether the device no longer works after ``error``: some, such as a failed launch, are harmless."""
        if not isinstance(error, _DEVICE_LOST) or is_out_of_memory(error):
            return False
        try:
            torch.cuda.synchronize(self.device)
        except Exception:
            return True
        return False

    def _free(self) -> None:
        """Free memory after a batch that did not fit.

        A full collection stops all threads, so it runs at most every :data:`_FULL_COLLECTION_EVERY` seconds. The other
        collections find the objects of the last batch, which are young.
        """
        now = time.monotonic()
        full = now - self._collected > _FULL_COLLECTION_EVERY
        if full:
            self._collected = now
        gc.collect(2 if full else 1)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _compute(self, items: Sequence[Item]) -> tuple[list[Finished], bool]:
        """Run a batch through its extractor.

        Return the outputs of its items on the CPU, grouped by equal options, and whether the next batch overwrites
        them.
        """
        started = time.monotonic()
        runtime, rows = items[0].runtime, _rows(items)
        with torch.inference_mode():
            parts, description = [item.inputs for item in items], runtime.description
            inputs = self._staging.inputs(parts, description.decoder, description.dtype)
            if description.edits:
                inputs += _factors(items, self.device)
            outputs = runtime.run(*inputs)
            values = [(info, by_image(info, outputs[info.key], rows)) for info in runtime.extractor.outputs]
            del inputs, outputs
            finished = [finish(values, *group) for group in by_options(items)]
            del values
            made = [by_key for group in finished for by_key in (group.outputs, group.overflows)]
            places = [(by_key, key) for by_key in made for key in by_key]
            copies, borrowed = self._staging.on_host([by_key[key] for by_key, key in places])
            for (by_key, key), copy in zip(places, copies, strict=True):
                by_key[key] = copy
        spent = time.monotonic() - started
        pace = spent / sum(item.row_bytes * len(item.rows) for item in items)
        # A single batch may be slow, such as the first of a size.
        runtime.seconds_per_byte = min(pace, 2 * (runtime.seconds_per_byte or pace))
        if self.device.type == "cpu":  # a GPU is never that slow, and launches of small rows say little of large ones
            runtime.pace.add(spent, items[0].row_flops, rows)
        for job in {item.job for item in items}:
            job.computed += spent
        return finished, borrowed


def _deliver(finished: Finished, borrowed: bool) -> None:
    """Deliver each job's rows. A failed delivery fails only its own job."""
    parts = deliveries(finished.items)
    try:
        counts = [len(job.output_rows(rows)) for job, rows in parts]
        # A single part needs no call of torch, which would release the GIL.
        pieces = {k: torch.split(v, counts) if len(counts) > 1 else (v,) for k, v in finished.outputs.items()}
    except Exception as error:
        log.exception("the outputs of a batch could not be delivered")
        for job, _ in parts:
            job.fail(_error_for(error))
        return
    for key, over in finished.overflows.items():
        for (job, rows), piece in zip(parts, torch.split(over, counts), strict=True):
            if piece.any():
                job.fail(overflow(key, job.image_of(rows, int(piece.nonzero()[0]))))
    for place, (job, rows) in enumerate(parts):
        try:
            job.deliver(rows, {key: piece[place] for key, piece in pieces.items()}, borrowed)
        except Exception as error:
            job.fail(_error_for(error))
    announce([job for job, _ in parts])


def _halved(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Split a batch into two with half the rows each; an item in the middle is split."""
    room = _rows(items) // 2
    first: list[Item] = []
    second: list[Item] = []
    for item in items:
        if room >= len(item.rows):
            first.append(item)
        elif room > 0:
            head, tail = item.split(room)
            first.append(head)
            second.append(tail)
        else:
            second.append(item)
        room = max(0, room - len(item.rows))
    return first, second


def _factors(items: Sequence[Item], device: torch.device) -> tuple[Tensor, ...]:
    """Return scale and shift of each edited node of a batch, in the order of the graph's inputs."""
    parts = [item.job.edits.of(item.rows) for item in items if item.job.edits is not None]
    return tuple(stacked(of_node).to(device) for of_node in zip(*parts, strict=True))


def _rows(items: Sequence[Item]) -> int:
    return sum(len(item.rows) for item in items)


def _error_for(error: BaseException) -> BadTensor | Problem:
    """Return the error for a request whose rows failed with ``error``."""
    if is_out_of_memory(error):
        return OutOfMemory("not even one image of this request fits into the memory that is left; send a smaller one")
    return failure(error)
