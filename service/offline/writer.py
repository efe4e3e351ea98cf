"""Rows of features, gathered into shards and written beside the computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import torch
from torch import Tensor

from service.engine.threads import compute_with
from service.offline.index import Index
from service.offline.shards import ShardFormat, shard_name, write_shard

ERRORS = "errors.jsonl"

_MOST_BYTES = 64 * 1024**2
_MOST_ROWS = 4096
_LONGEST = 300.0
"""Seconds of work that a kill may cost at most, where images take so long that a shard fills slowly."""

_MOST_ERRORS = 1024


class Writer:
    """Gathers rows into shards of one shape and has a thread of its own write them; two are in memory at most.

    Args:
        folder: where to.
        chosen: the format.
        index: what is entered there counts.
        about: what each shard says of itself.
        shard_rows: rows of a shard; None: as many as make some 64 MiB.
    """

    def __init__(
        self, folder: Path, chosen: ShardFormat, index: Index, about: Mapping[str, str], shard_rows: int | None
    ) -> None:
        self._folder = folder
        self._format = chosen
        self._index = index
        self._about = about
        self._most_rows = shard_rows or _MOST_ROWS
        self._most_bytes = _MOST_BYTES if shard_rows is None else None
        names = index.shards()
        self._number = int(names[-1].split("-")[1].split(".")[0]) + 1 if names else 0
        self._thread = ThreadPoolExecutor(1, "fxserve-write", compute_with, (1,))
        self._writing: asyncio.Future[None] | None = None
        self._paths: list[str] = []
        self._parts: dict[str, list[Tensor]] = {}
        self._bytes = 0
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
        if self._parts and any(self._parts[key][0].shape[1:] != values.shape[1:] for key, values in part.items()):
            await self._flush()
        start = 0
        while start < len(paths):
            stop = min(len(paths), start + self._most_rows - len(self._paths))
            for key, values in part.items():
                self._parts.setdefault(key, []).append(values[start:stop])
                self._bytes += values[start:stop].nbytes
            self._paths += paths[start:stop]
            if len(self._paths) == self._most_rows or (self._most_bytes and self._bytes >= self._most_bytes):
                await self._flush()
            start = stop

    async def _flush(self) -> None:
        """Have what was gathered written."""
        await self._written()
        if self._paths or self._errors:
            name = shard_name(self._number, self._format.suffix)
            self._number += bool(self._paths)
            self._writing = asyncio.get_running_loop().run_in_executor(
                self._thread, self._write, name, self._paths, self._parts, self._errors
            )
        self._paths, self._parts, self._bytes, self._errors = [], {}, 0, []
        self._since = time.monotonic()

    async def _written(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def _write(
        self, name: str, paths: list[str], parts: dict[str, list[Tensor]], errors: list[tuple[str, str]]
    ) -> None:
        if paths:
            rows = {key: torch.cat(values) for key, values in parts.items()}
            parts.clear()
            write_shard(self._format, self._folder / name, rows, paths, self._about)
        self._index.commit(name, paths, errors)
        with (self._folder / ERRORS).open("ab") as file:
            file.writelines(error_line(path, reason) for path, reason in errors)


def error_line(path: str, reason: str) -> bytes:
    """A line of ``errors.jsonl``."""
    return orjson.dumps({"path": path, "error": reason}, option=orjson.OPT_APPEND_NEWLINE)
