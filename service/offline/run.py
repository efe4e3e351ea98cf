"""From images to shards, with everything busy at a time: reading, decoding, computing, writing."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxcore.errors import FxError
from service.engine import FeatureOptions
from service.offline import boxes, shards, sources, spec_file
from service.offline.batches import Batches, Result, probe
from service.offline.computing import Local, Remote
from service.offline.folder import Folder
from service.offline.index import Index
from service.offline.sources import Reader, Source
from service.offline.workplace import Workplace
from service.offline.writer import ERRORS, Writer, error_line
from service.schemas.v1 import ExtractorSpec
from service.settings import Settings

WORTH_LOWERING = 1000
"""Images that make it worth to look for a faster backend, which takes some seconds."""

Report = Callable[[int, int, int], None]
"""Is told, now and then: images in all, those done, those that cannot be read."""


@dataclass(frozen=True)
class Job:
    """What to extract from what, and where to.

    Attributes:
        inputs: files, folders, archives, patterns and URLs; see :func:`service.offline.sources.find`.
        out: a folder on the disk or a URL of one: a new one, or one that an earlier run of the same job was writing.
        format: a key of :data:`service.offline.shards.FORMATS`.
        servers: the servers to use instead of this process.
        api_key: what they want to see.
        shard_rows: rows of a shard; None: as many as make some 64 MiB.
        boxes: the file of boxes that ``pool=roi`` pools, see :mod:`service.offline.boxes`; images without are left out.
    """

    inputs: tuple[str, ...]
    out: str | Path
    format: str
    spec: ExtractorSpec
    options: FeatureOptions
    servers: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    shard_rows: int | None = None
    boxes: str | None = None


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
    out = Folder(job.out)
    before = spec_file.read(out)
    if job.boxes is not None:
        next(boxes.read(job.boxes), None)  # what is wrong with the file as a whole is told before anything is built
    few = len(list(itertools.islice(sources.find(job.inputs), WORTH_LOWERING))) < WORTH_LOWERING
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
        probed = await probe(computer, job.options.pool)
        chosen = shards.shard_format(job.format, list(probed), [values.dtype for values in probed.values()])
        made = spec_file.Record(computer.described, job.options, job.format, probed)
        with shards.writing(out):
            made.settle(out)
            place = await asyncio.to_thread(Workplace, out)
            index = Index(place.folder)
        try:
            with shards.writing(out):
                await asyncio.to_thread(_prepare, job, chosen, place, index)
            writer = Writer(place, chosen, index, made.about(), job.shard_rows)
            await _Run(Batches(computer, Reader(settings.max_body_bytes), probed), index, writer, report).run()
            images, done, unreadable = index.counts()
            return Summary(made.outputs, images, done, unreadable, len(index.shards()))
        finally:
            index.close()
            with shards.writing(out):
                await asyncio.to_thread(place.close)
    finally:
        await computer.close()


def _prepare(job: Job, chosen: shards.ShardFormat, place: Workplace, index: Index) -> None:
    """Bring the index and the folder in line, and enter what there is to do."""
    index.keep(place.shards(chosen.suffix))
    place.remove_all_but(chosen.suffix, index.shards())
    enter(job, sources.find(job.inputs), index)
    with (place.folder / ERRORS).open("wb") as file:
        file.writelines(error_line(path, reason) for path, reason in index.errors())


def enter(job: Job, found: Iterable[Source], index: Index) -> None:
    """Enter the images that there are to do in the index, with their boxes.

    Raises:
        FxError: the file of boxes is wrong, names none of the images, or other boxes than those that were done.
    """
    if job.boxes is None:
        index.enter(found)
        return
    index.enter(found, boxes.read(job.boxes))
    images, done, lost = index.counts()
    if not images:
        raise FxError(f"{job.boxes} has no boxes")
    if lost == images and not done:
        path, reason = next(index.errors())
        raise FxError(f"{job.boxes} names no image that can be read; {path}: {reason}")


class _Run:
    """Keeps several batches under way and hands their rows to the writer in order."""

    def __init__(self, batches: Batches, index: Index, writer: Writer, report: Report) -> None:
        self._batches = batches
        self._index = index
        self._writer = writer
        self._report = report

    async def run(self) -> None:
        """Do all that is left."""
        images, done, unreadable = self._index.counts()
        self._report(images, done, unreadable)
        under_way: deque[asyncio.Task[Result]] = deque()

        async def take() -> None:
            nonlocal done, unreadable
            result = await under_way[0]
            under_way.popleft()
            await self._writer.add(result.paths, result.rows, result.errors)
            done, unreadable = done + result.images, unreadable + len(result.errors)
            self._report(images, done, unreadable)

        left = self._index.left()
        try:
            while block := await asyncio.to_thread(next, left, None):
                for some in self._batches.cut(block):
                    while len(under_way) >= self._batches.at_a_time:
                        await take()
                    under_way.append(asyncio.create_task(self._batches.result(some)))
            while under_way:
                await take()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await self._writer.close()  # what is done stays done, whatever ended it
            self._batches.close()
