"""Work that waits for the device, and how batches are made of it.

A :class:`Job` is one request. Its rows (images, or rows of tensors) are queued as :class:`Item`\\ s, each of rows that
have one shape. :class:`Queue` keeps a line for every (extractor, shape) and hands out, whenever the device is free, as
much as fits of the line whose first item has waited longest.

Batches are made for each extractor, not over the union of the nodes of several: a batch each took 0.65 to 0.91 of the
time of one batch over the union (``benchmarks/union.py``; two extractors with 1 and with 8 images each, eager and
OpenVINO). A union keeps the nodes of both alive and copies them for rows that nobody asked them of, for less overhead
a pass, and it would have to be lowered and checked for each combination of extractors that happens to come together.
What extractors over one model share is its weights.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from service.engine.errors import DeadlineExceeded, NotReady, OutOfMemory, contained, is_out_of_memory
from service.engine.options import FeatureOptions
from service.engine.staging import copied, copy_rows

if TYPE_CHECKING:
    from service.engine.records import ExtractorRecord


T = TypeVar("T")


class Job:
    """One request on its way through the device worker; made on the event loop that waits for its answer.

    The first of these settles it: the worker once all rows are there, a decoder that fails, or the event loop when
    nobody waits any more. ``queued`` (on the clock of ``time.monotonic()``) is set by whoever queues its rows;
    everything else belongs to the worker.

    Args:
        record: the extractor.
        options: what to do with its outputs.
        rows: how many rows the answer has.
        deadline: when the work becomes worthless, on the clock of ``time.monotonic()``.
    """

    def __init__(self, record: ExtractorRecord, options: FeatureOptions, rows: int, deadline: float) -> None:
        self.record = record
        self.options = options
        self.rows = rows
        self.deadline = deadline
        self.queued = 0.0
        self.computed = 0.0
        self._outputs: dict[str, Tensor] = {}
        self._missing = rows
        self._settled = threading.Lock()  # taken once, by whoever settles the job
        self._outcome: dict[str, Tensor] | Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[dict[str, Tensor]] = self._loop.create_future()

    async def answer(self) -> dict[str, Tensor]:
        """The outputs by key, ``[rows, ...]`` on the CPU. Once the call is cancelled nobody wants the job any more.

        Raises:
            EngineError: what the job failed of.
        """
        try:
            return await self._answer
        finally:
            self._settled.acquire(blocking=False)

    def wanted(self) -> bool:
        """Whether somebody still waits for the answer and it can still come in time."""
        if not self._settled.locked() and time.monotonic() > self.deadline:
            self.fail(DeadlineExceeded())
        return not self._settled.locked()

    def deliver(self, rows: range, outputs: dict[str, Tensor]) -> None:
        """Take the outputs ``[len(rows), ...]`` (on the CPU) of some rows. The last delivery makes the answer, which
        :func:`announce` brings to the event loop."""
        if self._settled.locked():
            return
        for key, values in outputs.items():
            if len(rows) == self.rows:
                self._outputs[key] = self._own(values)
                continue
            if key not in self._outputs:
                self._outputs[key] = torch.empty((self.rows, *values.shape[1:]), dtype=values.dtype)
            whole = self._outputs[key]
            if whole.shape[1:] != values.shape[1:]:
                self.fail(cannot_stack(key, [tuple(whole.shape[1:]), tuple(values.shape[1:])]))
                return
            copy_rows(whole, rows.start, values)
        self._missing -= len(rows)
        if self._missing == 0 and self._settled.acquire(blocking=False):
            self._outcome, self._outputs = self._outputs, {}

    def fail(self, error: BaseException) -> None:
        """Answer with ``error``, unless there is an answer already or nobody waits."""
        if is_out_of_memory(error):
            error = OutOfMemory("there was not enough memory for this request; send fewer or smaller images")
        if self._settled.acquire(blocking=False):
            self._outcome = contained(error)
            self._outputs = {}
        announce((self,))

    def _own(self, values: Tensor) -> Tensor:
        """``values`` in memory that neither a batch mate nor another key sees."""
        values = values.contiguous()
        storage = values.untyped_storage()
        taken = {tensor.untyped_storage().data_ptr() for tensor in self._outputs.values()}
        if storage.nbytes() != values.nbytes or storage.data_ptr() in taken:
            values = copied(values)
        return values

    def _arrive(self) -> None:
        """On the event loop: wake who waits."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or self._answer.done():  # nobody waits any more, or it is here already
            return
        if isinstance(outcome, Exception):
            self._answer.set_exception(outcome)
        else:
            self._answer.set_result(outcome)


def announce(jobs: Sequence[Job]) -> None:
    """Bring the answers of those of ``jobs``, all of one event loop, that are settled to whoever waits for them.

    A call for each would wake the loop for each, which then takes turns at the interpreter with its caller.
    """
    settled = [job for job in jobs if job._settled.locked()]
    if settled:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            settled[0]._loop.call_soon_threadsafe(_arrive, settled)


def _arrive(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job._arrive()


@dataclass(eq=False)
class Item:
    """Rows of one job that have one shape.

    Attributes:
        rows: their places in the answer.
        inputs: one tensor ``[len(rows), ...]`` for each input of the model; or uint8 pixels that
            :meth:`fxcore.decoding.Decoder.batch` makes one of. They are on the CPU, or where they were decoded.
        row_bytes: what one row takes on the device while it is computed, by prediction; above zero.
    """

    job: Job
    rows: range
    inputs: tuple[Tensor, ...]
    row_bytes: int
    since: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> Hashable:
        """Items with equal keys can share a batch."""
        return self.job.record, tuple((tuple(t.shape[1:]), t.dtype) for t in self.inputs)

    def split(self, rows: int) -> tuple[Item, Item]:
        """The first ``rows`` rows, and the rest."""
        return (
            Item(self.job, self.rows[:rows], tuple(t[:rows] for t in self.inputs), self.row_bytes, self.since),
            Item(self.job, self.rows[rows:], tuple(t[rows:] for t in self.inputs), self.row_bytes, self.since),
        )


@dataclass(eq=False)
class Undecoded:
    """A part of a job that the device worker decodes itself.

    Attributes:
        job: whose part it is.
        decode: called with what the decoded rows go to.
    """

    job: Job
    decode: Callable[[Callable[[Sequence[Item]], object]], None]


class Errand:
    """Other work for the device worker: done when no batch waits, or once its patience is over.

    Args:
        function: what to do.
        patience: seconds after which it goes before batches that wait.
    """

    def __init__(self, function: Callable[[], Any], patience: float) -> None:
        self.answer: Future[Any] = Future()
        self.latest = time.monotonic() + patience
        self._function = function

    def run(self) -> None:
        """Do it; what it returns or raises goes to ``answer``."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.answer.set_exception(contained(error))
        else:
            self.answer.set_result(result)


class Queue:
    """Lines of waiting items, one for each key; safe to use from several threads.

    Args:
        max_rows: most rows in a batch.
        max_bytes: most predicted bytes in a batch; one row is handed out whatever it takes.
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self._lines: dict[Hashable, deque[Item]] = {}
        self._errands: deque[Errand] = deque()
        self._offered: Undecoded | None = None
        self._changed = threading.Condition()
        self._closed: NotReady | None = None
        self._idle = False

    def put(self, items: Sequence[Item]) -> None:
        """Queue items. After :meth:`close` their jobs fail at once."""
        with self._changed:
            if self._closed is None:
                for item in items:
                    self._lines.setdefault(item.key, deque()).append(item)
                self._changed.notify()
                return
        for item in items:
            item.job.fail(self._closed)

    def errand(self, function: Callable[[], T], patience: float = 1.0) -> Future[T]:
        """Have the worker call ``function`` when nothing waits, or after ``patience`` seconds between two batches."""
        errand = Errand(function, patience)
        with self._changed:
            if self._closed is None:
                self._errands.append(errand)
                self._changed.notify()
            else:
                errand.answer.set_exception(self._closed)
        return errand.answer

    def offer(self, part: Undecoded) -> bool:
        """Have the worker decode ``part`` at once if it has nothing to do; whether it will."""
        with self._changed:
            if self._closed is not None or not self._idle or self._errands or self._lines:
                return False
            self._idle = False
            self._offered = part
            self._changed.notify()
            return True

    def take(self, before_waiting: Callable[[], object]) -> list[Item] | Undecoded | Errand | None:
        """What to do next, waiting until there is something; None once the queue is closed.

        A batch is the largest of a :func:`usual_size` that fits, of the line whose first item has waited longest. Items
        whose job is no longer wanted are dropped here, so nothing is computed for a client that left or a deadline that
        passed.

        Args:
            before_waiting: called when there is nothing, before waiting for it.
        """
        with self._changed:
            while self._closed is None:
                work = self._next()
                if work is not None:
                    self._idle = False
                    return work
                before_waiting()
                self._idle = True
                self._changed.wait()
            return None

    def drained(self) -> bool:
        """Whether no rows wait, asked by the worker when it is done with a batch.

        If so it counts as idle from now on, though it has yet to call :meth:`take`: a client may send its next image
        before that, as it did for one answer in eight over a single connection.
        """
        with self._changed:
            # A part that was offered is there to be fetched; another one would take its place.
            self._idle = not self._lines and self._offered is None
            return not self._lines

    def close(self, reason: NotReady) -> None:
        """Fail what waits and what is put from now on with ``reason``."""
        with self._changed:
            self._closed = reason
            waiting = [item for line in self._lines.values() for item in line]
            self._lines.clear()
            offered, self._offered = self._offered, None
            errands, self._errands = self._errands, deque()
            self._changed.notify_all()
        if offered is not None:
            offered.job.fail(reason)
        for errand in errands:
            with suppress(InvalidStateError):
                errand.answer.set_exception(reason)
        for item in waiting:
            item.job.fail(reason)

    def __len__(self) -> int:
        """How many items wait."""
        with self._changed:
            return sum(map(len, self._lines.values()))

    def _next(self) -> list[Item] | Undecoded | Errand | None:
        if self._offered is not None:
            offered, self._offered = self._offered, None
            return offered
        if self._errands and self._errands[0].latest < time.monotonic():
            return self._errands.popleft()
        while self._lines:
            key = min(self._lines, key=lambda key: self._lines[key][0].since)
            batch: list[Item] = []
            line = self._lines[key]
            try:
                self._form(batch, line)
            except BaseException as error:  # whoever came for this line would fail of it again
                for item in (*batch, *line):
                    item.job.fail(error)
                batch.clear()
                line.clear()
            if not line:
                del self._lines[key]
            if batch:
                return batch
        return self._errands.popleft() if self._errands else None

    def _form(self, batch: list[Item], line: deque[Item]) -> None:
        """Move a batch from ``line`` to ``batch``; each item is in one of them all the time."""
        rows = 0
        while line:
            item = line[0]
            if not item.job.wanted():
                line.popleft()
                continue
            room = min(self.max_rows, max(1, self.max_bytes // item.row_bytes)) - rows
            if room <= 0:
                break
            if len(item.rows) > room:
                item, line[0] = item.split(room)
            else:
                line.popleft()
            batch.append(item)
            rows += len(item.rows)
        excess = rows - usual_size(rows)
        while excess:
            item = batch[-1]
            if len(item.rows) > excess:
                batch[-1], item = item.split(len(item.rows) - excess)
            else:
                batch.pop()
            line.appendleft(item)
            excess -= len(item.rows)


def usual_size(rows: int) -> int:
    """The largest batch made of ``rows`` rows: a power of two, or three times one.

    Compilers and CUDA graphs prepare for each size anew: a first batch took 0.3 s where the second took 0.03. Up to 32
    there are only ten of these sizes.
    """
    power = 1 << (rows.bit_length() - 1) if rows else 0
    return power + power // 2 if rows >= power + power // 2 else power


def cannot_stack(key: str, shapes: Sequence[tuple[int, ...]]) -> BadTensor:
    """The error for outputs of one request that do not form one tensor."""
    shown = " and ".join(" x ".join(map(str, shape)) for shape in shapes[:2])
    return BadTensor(
        f"output {key!r} has different shapes for the images of this request ({shown}) and cannot be one tensor; send "
        "images of one size, send them one by one, or ask for pool=avg",
        key=key,
    )
