"""Rows of features, gathered into shards and written beside the computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import orjson
import torch
from torch import Tensor

from fxcore.memory import give_back
from service.engine.device.threads import compute_with
from service.offline.index import Index
from service.offline.shards import ShardFormat, shard_name, write_shard, writing
from service.offline.workplace import Workplace

ERRORS = "errors.jsonl"

_MOST_BYTES = 64 * 1024**2
_MOST_ROWS = 4096
_LONGEST = 300.0
"""Seconds of work that a kill may cost at most, where images take so long that a shard fills slowly."""

_MOST_ERRORS = 1024


class Writer:
    """Gathers rows into shards of one shape and has a thread of its own write them; two are in memory at most.

    Args:
        place: where to.
        chosen: the format.
        index: what is entered there counts.
        about: what each shard says of itself.
        shard_rows: rows of a shard; None: as many as make some 64 MiB.
    """

    def __init__(
        self, place: Workplace, chosen: ShardFormat, index: Index, about: Mapping[str, str], shard_rows: int | None
    ) -> None:
        self._place = place
        self._format = chosen
        self._index = index
        self._about = about
        self._asked_rows = shard_rows
        names = index.shards()
        self._number = int(names[-1].split("-")[1].split(".")[0]) + 1 if names else 0
        self._thread = ThreadPoolExecutor(1, "fxserve-write", compute_with, (1,))
        self._writing: asyncio.Future[None] | None = None
        self._paths: list[str] = []
        self._rows: dict[str, Tensor] = {}
        self._room = 0
        self._errors: list[tuple[str, str]] = []
        self._since = time.monotonic()

    async def add(
        self, paths: Sequence[str], parts: Sequence[Mapping[str, Tensor]], errors: Sequence[tuple[str, str]]
    ) -> None:
        """Take features, some rows a part, with the paths of all rows, and (path, reason) of what has none."""
        self._errors += errors
        start = 0
        for part in parts:
            rows = len(next(iter(part.values())))
            await self._add(paths[start : start + rows], part)
            start += rows
        if len(self._errors) >= _MOST_ERRORS or time.monotonic() - self._since > _LONGEST:
            await self._flush()

    async def close(self) -> None:
        """Write what is left and wait until all is written."""
        try:
            await self._flush()
            await self._written()
        finally:
            self._thread.shutdown(wait=False)

    async def _add(self, paths: Sequence[str], part: Mapping[str, Tensor]) -> None:
        if self._paths and any(self._rows[key].shape[1:] != values.shape[1:] for key, values in part.items()):
            await self._flush()
        start = 0
        while start < len(paths):
            if not self._paths:
                self._take_memory(part, _end(paths, start) - start)
            there = len(self._paths)
            stop = start  # all rows of an image, which are of its boxes, stay together
            while stop < len(paths) and there + (end := _end(paths, stop)) - start <= self._room:
                stop = end
            for key, values in part.items():
                self._rows[key][there : there + stop - start] = values[start:stop]
            self._paths += paths[start:stop]
            if stop < len(paths) or len(self._paths) == self._room:
                await self._flush()
            start = stop

    def _take_memory(self, part: Mapping[str, Tensor], least: int) -> None:
        """Memory for a shard of such rows, ``least`` at least. Many small tensors, kept until the shard is full, would
        leave the memory between them in pieces that no batch fits into: three times as much was seen to be held."""
        row = sum(values[:1].nbytes for values in part.values())
        self._room = max(least, self._asked_rows or min(_MOST_ROWS, _MOST_BYTES // max(1, row)))
        self._rows = {key: torch.empty(self._room, *v.shape[1:], dtype=v.dtype) for key, v in part.items()}

    async def _flush(self) -> None:
        """Have what was gathered written."""
        await self._written()
        if self._paths or self._errors:
            name = shard_name(self._number, self._format.suffix)
            self._number += bool(self._paths)
            rows = {key: values[: len(self._paths)] for key, values in self._rows.items()}
            self._writing = asyncio.get_running_loop().run_in_executor(
                self._thread, self._write, name, self._paths, rows, self._errors
            )
        self._paths, self._rows, self._errors = [], {}, []
        self._since = time.monotonic()

    async def _written(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def _write(self, name: str, paths: list[str], rows: Mapping[str, Tensor], errors: list[tuple[str, str]]) -> None:
        with writing(self._place):
            if paths:
                write_shard(self._format, self._place.folder / name, rows, paths, self._about)
                self._place.put(name)
            self._index.commit(name, paths, errors)
            self._place.committed()
            with (self._place.folder / ERRORS).open("ab") as file:
                file.writelines(error_line(path, reason) for path, reason in errors)
        give_back()  # else what the allocator keeps of a shard's memory adds up: 1 KB an image was seen


def _end(paths: Sequence[str], start: int) -> int:
    """Where the rows of the image at ``start`` end."""
    return next((row for row in range(start, len(paths)) if paths[row] != paths[start]), len(paths))


def error_line(path: str, reason: str) -> bytes:
    """A line of ``errors.jsonl``."""
    return orjson.dumps({"path": path, "error": reason}, option=orjson.OPT_APPEND_NEWLINE)
