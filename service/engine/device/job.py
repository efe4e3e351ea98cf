"""One request's work on the device: its rows, and the response assembled from them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from service.engine.description import Description
from service.engine.device.staging import copied, copy_rows
from service.engine.errors import as_exception, is_out_of_memory
from service.engine.options import FeatureOptions
from service.engine.rows.edits import Edits
from service.engine.rows.regions import Regions
from service.engine.rows.shapes import RowShape
from service.engine.runtime.runtime import Runtime
from service.problems import OutOfMemory, Overflow, Ragged


class Job:
    """One request in the device worker, created on the event loop that waits for its response.

    It is settled once, by whichever comes first: the worker finishes all rows, a decoder fails, or the caller stops
    waiting.

    Args:
        runtime: the extractor.
        options: how to process its outputs.
        rows: number of input rows.
        regions: regions to pool instead of whole maps; if given, the response has one row per region.
        matrices: projection matrices by number of values per row.
        edits: edits of inner values, if ``runtime`` is a variant for edits.

    Attributes:
        queued: when its last rows were queued, on the clock of ``time.monotonic()``; set by the thread that does so.
        computed: total seconds of its batches; set by the worker.
    """

    def __init__(
        self,
        runtime: Runtime,
        options: FeatureOptions,
        rows: int,
        regions: Regions | None = None,
        matrices: Mapping[int, Tensor] | None = None,
        edits: Edits | None = None,
    ) -> None:
        self.runtime = runtime
        self.options = options
        self.rows = rows
        self.regions = regions
        self.matrices = matrices or {}
        self.edits = edits
        self.queued = 0.0
        self.computed = 0.0
        self._outputs: dict[str, Tensor] = {}
        self._missing = rows
        # Locked once it is settled, by the first of several threads that try.
        self._settled = threading.Lock()
        self._outcome: dict[str, Tensor] | Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[dict[str, Tensor]] | None = self._loop.create_future()

    async def result(self) -> dict[str, Tensor]:
        """Return the outputs by key, ``[rows, ...]`` on the CPU. Cancelling the call drops the job.

        Raises:
            Problem: the job failed.
        """
        assert self._future is not None
        try:
            return await self._future
        finally:
            self._settled.acquire(blocking=False)
            # Its error's traceback holds the caller's frame and thus this job: a cycle that would keep the inputs.
            self._future = None

    def wanted(self) -> bool:
        """Return whether the caller still waits for the response."""
        return not self._settled.locked()

    def output_rows(self, rows: range) -> range:
        """Return the response rows that belong to the input rows ``rows``."""
        return rows if self.regions is None else self.regions.of(rows)

    def image_of(self, rows: range, place: int) -> int:
        """Return the image index of response row ``place`` among those of the input ``rows``."""
        if self.regions is None:
            return rows[place]
        return int(self.regions.image[self.output_rows(rows)[place]])

    def deliver(self, rows: range, outputs: dict[str, Tensor], borrowed: bool = False) -> None:
        """Store the outputs of some rows.

        The last delivery completes the response; :func:`announce` then wakes the caller.

        Args:
            rows: their indices.
            outputs: key → ``[len(output_rows(rows)), ...]``, on the CPU.
            borrowed: whether their memory is overwritten after this call.
        """
        if self._settled.locked():
            return
        for key, values in outputs.items():
            if len(rows) == self.rows:
                self._outputs[key] = copied(values) if borrowed else self._own(values)
                continue
            if key not in self._outputs:
                many = self.rows if self.regions is None else self.regions.count
                self._outputs[key] = torch.empty((many, *values.shape[1:]), dtype=values.dtype)
            whole = self._outputs[key]
            if whole.shape[1:] != values.shape[1:]:
                self.fail(cannot_stack(self.runtime.description, key, whole.shape[1:], values.shape[1:]))
                return
            copy_rows(whole, self.output_rows(rows).start, values)
        self._missing -= len(rows)
        if self._missing == 0 and self._settled.acquire(blocking=False):
            self._outcome, self._outputs = self._outputs, {}

    def fail(self, error: BaseException) -> None:
        """Settle the job with ``error``, unless it is already settled."""
        if is_out_of_memory(error):
            error = OutOfMemory("there was not enough memory for this request; send fewer or smaller images")
        if self._settled.acquire(blocking=False):
            self._outcome = as_exception(error)
            self._outputs = {}
        announce((self,))

    def _own(self, values: Tensor) -> Tensor:
        """Return ``values`` in memory that is not shared with another job of the batch or another key."""
        values = values.contiguous()
        storage = values.untyped_storage()
        taken = {tensor.untyped_storage().data_ptr() for tensor in self._outputs.values()}
        if storage.nbytes() != values.nbytes or storage.data_ptr() in taken:
            values = copied(values)
        return values


def announce(jobs: Sequence[Job]) -> None:
    """Wake the callers of all settled ``jobs``, which belong to one event loop.

    They are woken by one call, because each call wakes the loop, which then competes with this thread for the GIL.
    """
    settled = [job for job in jobs if job._settled.locked()]
    if settled:
        with suppress(RuntimeError):  # the loop is closed
            settled[0]._loop.call_soon_threadsafe(_wake, settled)


def _wake(jobs: Sequence[Job]) -> None:
    """Wake the callers of settled ``jobs``. On the event loop."""
    for job in jobs:
        outcome, job._outcome = job._outcome, None
        future = job._future
        if outcome is None or future is None or future.done():  # the caller is gone or was already woken
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


@dataclass(eq=False)
class Item:
    """Rows of one job, all of one shape.

    Attributes:
        runtime: computes them: the job's runtime, or its variant for their size.
        rows: their indices in the request.
        inputs: one tensor ``[len(rows), ...]`` per model input, or uint8 pixels for
            :meth:`fxcore.images.decoding.Decoder.batch`, on the CPU.
        shape: the planned shape of a row; uint8 pixels have another one until they are a batch.
        row_bytes: predicted bytes of one row on the device while it is computed; greater than zero.
        since: when it was queued, on the clock of ``time.monotonic()``.
        row_flops: FLOPs of one row; 0 if they are unknown.
    """

    job: Job
    runtime: Runtime
    rows: range
    inputs: tuple[Tensor, ...]
    shape: RowShape
    row_bytes: int
    since: float = field(default_factory=time.monotonic)
    row_flops: int = 0

    def split(self, rows: int) -> tuple[Item, Item]:
        """Split into the first ``rows`` rows and the rest."""
        return (
            replace(self, rows=self.rows[:rows], inputs=tuple(t[:rows] for t in self.inputs)),
            replace(self, rows=self.rows[rows:], inputs=tuple(t[rows:] for t in self.inputs)),
        )


def overflow(key: str, image: int) -> Overflow:
    """Return the error for an image whose output has values that overflow the requested dtype."""
    return Overflow(
        f"image {image}: output {key!r} has values beyond 65,504, the largest of float16: ask for dtype=bfloat16 or "
        "dtype=float32, or for normalize=l2",
        index=image,
        key=key,
    )


def cannot_stack(description: Description, key: str, first: Sequence[int], other: Sequence[int]) -> BadTensor | Ragged:
    """Return the error for outputs of one request that cannot form one tensor."""
    shown = " and ".join(" x ".join(map(str, shape)) for shape in (first, other))
    why = f"output {key!r} has different shapes for the images of this request ({shown})"
    if description.spec.fit == "native":
        return Ragged(why, key)
    return BadTensor(
        f"{why} and cannot be one tensor; send images of one size, send them one by one, or ask for pool=avg", key=key
    )
