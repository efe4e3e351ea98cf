"""From images to shards, with everything busy at a time: reading, decoding, computing, writing."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from fxcore.errors import BadImage
from service.engine import FeatureOptions
from service.engine.device.threads import compute_with
from service.offline import shards, sources, spec_file
from service.offline.computing import Computer, Local, Remote, Rows, Unreadable, concerns_an_image
from service.offline.index import Index
from service.offline.sources import Reader, Source
from service.offline.writer import ERRORS, Writer, error_line
from service.schemas.v1 import ExtractorSpec
from service.settings import Settings

_BATCH = 16
"""Images handed to the engine together; it makes its own batches of them."""

_BYTES_UNDER_WAY = 128 * 1024**2
"""About the most bytes of features on their way from the model to a shard."""

_WORTH_LOWERING = 1000
"""Images that make it worth to look for a faster backend, which takes some seconds."""

Report = Callable[[int, int, int], None]
"""Is told, now and then: images in all, those done, those that cannot be read."""


@dataclass(frozen=True)
class Job:
    """What to extract from what, and where to.

    Attributes:
        inputs: files, folders, archives and patterns; see :func:`service.offline.sources.find`.
        out: a folder: a new one, or one that an earlier run of the same job was writing.
        format: a key of :data:`service.offline.shards.FORMATS`.
        servers: the servers to use instead of this process.
        api_key: what they want to see.
        shard_rows: images of a shard; None: as many as make some 64 MiB.
    """

    inputs: tuple[str, ...]
    out: Path
    format: str
    spec: ExtractorSpec
    options: FeatureOptions
    servers: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    shard_rows: int | None = None


@dataclass(frozen=True)
class Summary:
    """What a run left behind.

    Attributes:
        outputs: key, node, shape of one image (None where it depends on the image) and dtype of each output.
        images: images found and done before.
        done: those whose features are in shards, by this run or an earlier one.
        unreadable: those that are listed in ``errors.jsonl``.
        shards: how many there are.
    """

    outputs: list[dict[str, Any]]
    images: int
    done: int
    unreadable: int
    shards: int


def extract(job: Job, settings: Settings, report: Report = lambda images, done, unreadable: None) -> Summary:
    """Run ``job``, or what an earlier run of it left to do.

    Raises:
        FxError: it cannot be done as asked, or the folder holds something else or cannot be written.
    """
    return asyncio.run(_extract(job, settings, report))


async def _extract(job: Job, settings: Settings, report: Report) -> Summary:
    before = spec_file.read(job.out)
    few = len(list(itertools.islice(sources.find(job.inputs), _WORTH_LOWERING))) < _WORTH_LOWERING
    computer: Local | Remote
    if job.servers:
        computer = Remote(job.servers, job.api_key, job.options)
    else:
        computer = Local(settings, job.options, fast=not few and before is None)
    try:
        if isinstance(computer, Remote):
            await computer.start(job.spec)
        else:
            await computer.start(job.spec, before.get("backend") if before else None)
        probe = await computer.features([_probe()])
        chosen = shards.shard_format(job.format, list(probe), [values.dtype for values in probe.values()])
        made = spec_file.Record(computer.described, job.options, job.format, probe)
        with shards.writing(job.out):
            made.settle(job.out)
            index = Index(job.out)
        try:
            with shards.writing(job.out):
                await asyncio.to_thread(_prepare, job, chosen, index)
            writer = Writer(job.out, chosen, index, made.about(), job.shard_rows)
            await _Run(computer, index, writer, Reader(settings.max_body_bytes), report).run(probe)
            images, done, unreadable = index.counts()
            return Summary(made.outputs, images, done, unreadable, len(index.shards()))
        finally:
            index.close()
    finally:
        await computer.close()


def _prepare(job: Job, chosen: shards.ShardFormat, index: Index) -> None:
    """Bring the index and the folder in line, and enter what there is to do."""
    index.keep(shard for shard in index.shards() if (job.out / shard).exists())
    shards.remove_all_but(job.out, chosen.suffix, index.shards())
    index.enter(sources.find(job.inputs))
    with (job.out / ERRORS).open("wb") as file:
        file.writelines(error_line(path, reason) for path, reason in index.errors())


def _probe() -> bytes:
    """An image that is always the same: coloured noise on a slope."""
    noise = np.random.default_rng(0).integers(0, 128, (256, 256, 3), dtype=np.uint8)
    slope = np.arange(256, dtype=np.uint8)[:, None, None] // 2
    buffer = io.BytesIO()
    PIL.Image.fromarray(noise + slope).save(buffer, "PNG")
    return buffer.getvalue()


@dataclass(frozen=True)
class _Result:
    """What came of some images, in their order."""

    paths: list[str]
    rows: list[Rows]
    errors: list[tuple[str, str]]


class _Run:
    """Keeps several batches under way and hands their rows to the writer in order."""

    def __init__(self, computer: Computer, index: Index, writer: Writer, reader: Reader, report: Report) -> None:
        self._computer = computer
        self._index = index
        self._writer = writer
        self._reader = reader
        self._report = report
        self._readers = ThreadPoolExecutor(4, "fxserve-read", compute_with, (1,))
        self._unpacker = ThreadPoolExecutor(1, "fxserve-unpack", compute_with, (1,))

    async def run(self, probe: Rows) -> None:
        """Do all that is left; ``probe`` is what one image gives."""
        row_bytes = max(1, sum(values.nbytes for values in probe.values()))
        most = max(4, min(self._computer.at_a_time, _BYTES_UNDER_WAY // row_bytes))
        batch = max(1, min(_BATCH, most // 4)) if self._computer.described.one_size else 1
        images, done, unreadable = self._index.counts()
        self._report(images, done, unreadable)
        under_way: deque[asyncio.Task[_Result]] = deque()

        async def take() -> None:
            nonlocal done, unreadable
            result = await under_way[0]
            under_way.popleft()
            await self._writer.add(result.paths, result.rows, result.errors)
            done, unreadable = done + len(result.paths), unreadable + len(result.errors)
            self._report(images, done, unreadable)

        left = self._index.left()
        try:
            while block := await asyncio.to_thread(next, left, None):
                for start in range(0, len(block), batch):
                    while len(under_way) * batch >= most:
                        await take()
                    under_way.append(asyncio.create_task(self._batch(block[start : start + batch])))
            while under_way:
                await take()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await self._writer.close()  # what is done stays done, whatever ended it
            for pool in (self._readers, self._unpacker):
                pool.shutdown(wait=False, cancel_futures=True)
            self._reader.close()

    async def _batch(self, batch: Sequence[Source]) -> _Result:
        pool = self._unpacker if any(source.packed for source in batch) else self._readers
        found, errors = await asyncio.get_running_loop().run_in_executor(pool, self._read, batch)
        if not found:
            return _Result([], [], errors)
        try:
            rows = await self._computer.features([data for _, data in found])
            return _Result([path for path, _ in found], [rows], errors)
        except Exception as error:
            if not concerns_an_image(error) and not isinstance(error, Unreadable):
                raise
        # Alone, so that one costs no other its place.
        alone = await asyncio.gather(*(self._alone(data) for _, data in found))
        done = [(path, one) for (path, _), one in zip(found, alone, strict=True) if isinstance(one, dict)]
        errors += [(path, one) for (path, _), one in zip(found, alone, strict=True) if isinstance(one, str)]
        return _Result([path for path, _ in done], [one for _, one in done], errors)

    async def _alone(self, data: bytes) -> Rows | str:
        try:
            return await self._computer.features([data])
        except Unreadable as error:
            return error.detail

    def _read(self, batch: Sequence[Source]) -> tuple[list[tuple[str, bytes]], list[tuple[str, str]]]:
        found, errors = [], []
        for source in batch:
            try:
                found.append((source.path, self._reader.read(source)))
            except BadImage as error:
                errors.append((source.path, error.detail))
        return found, errors
