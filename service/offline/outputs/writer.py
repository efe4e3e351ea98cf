"""Gathering of feature rows into shards, which are written in a separate thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from fxcore.memory import give_back
from service.engine.threads import compute_with
from service.offline.atomic import write_whole
from service.offline.batches import Result
from service.offline.failures import write_errors
from service.offline.outputs.shards import ShardFormat, shard_name, shard_number
from service.offline.outputs.working_folder import WorkingFolder

_MAX_BYTES = 64 * 1024**2
_MAX_ROWS = 4096
_MAX_SECONDS = 300.0
"""Maximum seconds between shards, so that a killed run loses no more work than that."""

_MAX_ERRORS = 1024


class Writer:
    """Gathers rows of equal shape into shards and writes them in a thread; at most two shards are in memory.

    Args:
        folder: the folder to write to; finished shards are added to its index.
        chosen: the file format.
        metadata: metadata of each shard.
        shard_rows: rows per shard; None for about 64 MiB of them.
    """

    def __init__(
        self, folder: WorkingFolder, chosen: ShardFormat, metadata: Mapping[str, str], shard_rows: int | None
    ) -> None:
        self._folder = folder
        self._format = chosen
        self._metadata = metadata
        self._shard_rows = shard_rows
        # Not the last name: from a million shards on, names are longer and sort before shorter ones.
        self._number = 1 + max(map(shard_number, folder.index.shards()), default=-1)
        self._thread = ThreadPoolExecutor(1, "fxserve-write", compute_with, (1,))
        self._writing: Future[None] | None = None
        self._paths: list[str] = []
        self._rows: dict[str, Tensor] = {}
        self._capacity = 0
        self._errors: list[tuple[str, str]] = []
        self._last_flush = time.monotonic()

    async def add(self, result: Result) -> None:
        """Add the features of some images."""
        paths, rows = result.paths, result.rows
        self._errors += result.errors
        if self._paths and any(self._rows[key].shape[1:] != values.shape[1:] for key, values in rows.items()):
            await self._flush()
        start = 0
        while start < len(paths):
            if not self._paths:
                self._allocate(rows, _end_of_image(paths, start) - start)
            there = len(self._paths)
            stop = start  # all rows of an image (its regions) go into one shard
            while stop < len(paths) and there + (end := _end_of_image(paths, stop)) - start <= self._capacity:
                stop = end
            for key, values in rows.items():
                self._rows[key][there : there + stop - start] = values[start:stop]
            self._paths += paths[start:stop]
            if stop < len(paths) or len(self._paths) == self._capacity:
                await self._flush()
            start = stop
        if len(self._errors) >= _MAX_ERRORS or time.monotonic() - self._last_flush > _MAX_SECONDS:
            await self._flush()

    def close(self) -> None:
        """Write the remaining rows and wait for the writer. Blocks, so that nothing can cancel it."""
        try:
            self._end_writing()
            self._begin_writing()
            self._end_writing()
        finally:
            self._thread.shutdown()

    def _allocate(self, rows: Mapping[str, Tensor], least: int) -> None:
        """Allocate memory for a shard of at least ``least`` rows shaped like ``rows``.

        Keeping many small tensors until the shard is full would fragment the heap.
        """
        row = sum(values[:1].nbytes for values in rows.values())
        self._capacity = max(least, self._shard_rows or min(_MAX_ROWS, _MAX_BYTES // max(1, row)))
        self._rows = {key: torch.empty(self._capacity, *v.shape[1:], dtype=v.dtype) for key, v in rows.items()}

    async def _flush(self) -> None:
        """Start writing the gathered rows, once the rows before them are written."""
        if self._writing is not None:
            with suppress(Exception):  # it is raised below
                await asyncio.shield(asyncio.wrap_future(self._writing))  # cancelling it does not cancel the writing
            self._end_writing()
        self._begin_writing()

    def _begin_writing(self) -> None:
        if self._paths or self._errors:
            name = shard_name(self._number, self._format.suffix)
            self._number += bool(self._paths)
            rows = {key: values[: len(self._paths)] for key, values in self._rows.items()}
            self._writing = self._thread.submit(self._write, name, self._paths, rows, self._errors)
        self._paths, self._rows, self._errors = [], {}, []
        self._last_flush = time.monotonic()

    def _end_writing(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, name: str, paths: list[str], rows: Mapping[str, Tensor], errors: list[tuple[str, str]]) -> None:
        with write_errors(self._folder):
            size = None
            if paths:
                target, write = self._folder.path / name, self._format.write
                write_whole(target, lambda file: write(file, rows, paths, self._metadata))
                size = self._folder.publish(name)
            self._folder.commit(name, paths, errors, size=size)
        give_back()  # otherwise the allocator accumulates memory with every shard


def _end_of_image(paths: Sequence[str], start: int) -> int:
    """Return the index after the last row of the image at row ``start``."""
    return next((row for row in range(start, len(paths)) if paths[row] != paths[start]), len(paths))
