"""Extraction jobs: reading, decoding, computing and writing run concurrently."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from fxcore.errors import FxError
from service.choices import RegionPooling
from service.engine import FeatureOptions
from service.offline.batches import Batches, probe
from service.offline.failures import write_errors
from service.offline.folder import Folder
from service.offline.inputs import regions, sources
from service.offline.inputs.reader import Reader
from service.offline.inputs.skipped import Skipped
from service.offline.inputs.sources import Source
from service.offline.outputs import shards
from service.offline.outputs.index import FILE, Index
from service.offline.outputs.spec_file import SpecFile
from service.offline.outputs.working_folder import WorkingFolder
from service.offline.outputs.writer import Writer
from service.offline.runners.local import LocalRunner
from service.offline.runners.remote import RemoteRunner
from service.offline.runners.runner import Runner
from service.offline.statistics.files import check_installed
from service.offline.statistics.reducer import Reducer, Reduction
from service.offline.statistics.statistics import Statistics
from service.schemas.regions import KINDS
from service.schemas.specs import ExtractorSpec
from service.settings import Settings

_MAX_COUNTED = 20_000
"""Maximum images counted before the run: with more, searching for a faster backend pays off on any model."""

_TERMINATED = 128 + signal.SIGTERM
"""Exit status of a run that SIGTERM ended, as in shells."""

Report = Callable[[int, int, int], None]
"""Progress callback: number of images, number done, and number that could not be read."""


@dataclass(frozen=True)
class Job:
    """An extraction job.

    Attributes:
        inputs: files, folders, archives, patterns and URLs; see :func:`service.offline.inputs.sources.find`.
        out: path or URL of the output folder: a new one, or one of an earlier run of the same job, which is resumed.
        format: a key of :data:`service.offline.outputs.shards.FORMATS`.
        spec: the extractor.
        options: how to pool and cast its outputs.
        servers: URLs of servers to use instead of this process.
        api_key: API key for the servers.
        shard_rows: rows per shard; None for about 64 MiB of them.
        regions: file with the boxes, points or masks to pool; see :mod:`service.offline.inputs.regions`. Images without
            regions are skipped.
        reduce: statistics to write instead of the features; see :func:`service.choices.reductions`. ``format`` and
            ``shard_rows`` are then ignored.
    """

    inputs: tuple[str, ...]
    out: str | Path
    format: str
    spec: ExtractorSpec
    options: FeatureOptions
    servers: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    shard_rows: int | None = None
    regions: str | None = None
    reduce: str | None = None


@dataclass(frozen=True)
class Summary:
    """Result of a run, including earlier runs into the same folder.

    Attributes:
        outputs: key, node, shape per image (None if it depends on the image) and dtype of each output.
        images: number of images found now or done before.
        done: number of images whose features are in shards.
        unreadable: number of images listed in ``errors.jsonl``.
        shards: number of shards; 0 for statistics.
        skipped: files found in this run that are not images.
    """

    outputs: list[dict[str, Any]]
    images: int
    done: int
    unreadable: int
    shards: int
    skipped: Skipped = field(default_factory=Skipped)


def extract(job: Job, settings: Settings, report: Report = lambda images, done, unreadable: None) -> Summary:
    """Run ``job``, or resume an earlier run of it.

    In the main thread, SIGTERM ends it like Ctrl-C, with all finished work kept; a second one, or one before the first
    image is found, ends the process at once.

    Raises:
        FxError: the job is not possible, or the output folder holds something else or cannot be written.
        SystemExit: it was ended by SIGTERM.
    """
    with _sigterm_restored() as main_thread:
        try:
            return asyncio.run(_extract(job, settings, report, main_thread))
        except asyncio.CancelledError:
            raise SystemExit(_TERMINATED) from None


@contextmanager
def _sigterm_restored() -> Iterator[bool]:
    """Restore the handler of SIGTERM after the block. Yields whether the block may set one."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield False
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield True
    finally:
        if before is not None:  # None: Python did not install it
            signal.signal(signal.SIGTERM, before)


def _exit_on_sigterm() -> None:
    """Make SIGTERM end the process at once. By default, the first process of a container ignores it."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(_TERMINATED))


def _cancel_on_sigterm() -> None:
    """Make SIGTERM cancel the current task, which the event loop does once it runs."""
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        _exit_on_sigterm()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, cancel)


async def _extract(job: Job, settings: Settings, report: Report, handle_sigterm: bool) -> Summary:
    if handle_sigterm:
        _exit_on_sigterm()  # there is nothing to keep yet
    out = Folder(job.out)
    before = check(job, out)
    runner: Runner
    if job.servers:
        runner = RemoteRunner(job.servers, job.api_key, job.options)
    else:
        backend = before.backend if before else None
        runner = LocalRunner(settings, job.options, lambda: count(job.inputs), backend)
    if handle_sigterm:
        _cancel_on_sigterm()
    try:
        await runner.start(job.spec)
        probed = await probe(runner, job.options.pool)
        info = runner.info
        chosen = empty = None
        if job.reduce is None:
            chosen = shards.shard_format(job.format, list(probed), [values.dtype for values in probed.values()])
        else:
            empty = Statistics.empty(job.reduce, info.layouts, probed)
        spec = SpecFile.of(info, job.options, job.format, probed, job.reduce)
        with write_errors(out):
            spec.write_or_check(out)
            folder = await asyncio.to_thread(WorkingFolder, out)
        try:
            with write_errors(out):
                skipped = await asyncio.to_thread(prepare, job, chosen, folder, spec)
            writer: Writer | Reducer
            if chosen is not None:
                writer = Writer(folder, chosen, spec.metadata(), job.shard_rows)
            else:
                assert empty is not None
                writer = Reducer(Reduction(folder, empty, spec))
            index = folder.index
            with closing(Batches(runner, Reader(settings.max_body_bytes), probed)) as batches:
                await _run(batches, index, writer, report)
            return Summary(spec.outputs, *index.counts(), len(index.shards()) if chosen else 0, skipped)
        finally:
            with write_errors(out):
                await asyncio.to_thread(folder.close)
    finally:
        await runner.close()


def count(inputs: Sequence[str]) -> int:
    """Return the number of images in ``inputs``, or ``sys.maxsize`` if there are many."""
    found = sum(1 for _ in itertools.islice(sources.find(inputs), _MAX_COUNTED))
    return found if found < _MAX_COUNTED else sys.maxsize


def prepare(job: Job, chosen: shards.ShardFormat | None, folder: WorkingFolder, spec: SpecFile) -> Skipped:
    """Make the index and the folder consistent, and add the images to extract. Return the skipped files.

    Raises:
        FxError: the index is of another folder, or an input or the file of regions cannot be used.
    """
    if not folder.index.claim(spec.run):
        raise FxError(
            f"{folder}/{FILE} is of another folder; put back its own, or remove it to compute all images again"
        )
    skipped = Skipped(job.out)
    if chosen is not None:  # statistics are in the index itself
        folder.match_shards(chosen.suffix)
    add_images(job, sources.find(job.inputs, skipped), folder.index)
    folder.list_errors()
    return skipped


def check(job: Job, out: Folder) -> SpecFile | None:
    """Check a job before anything is built, and return the description of an earlier run in ``out``.

    Raises:
        FxError: ``out`` holds something else, an input or the file of regions cannot be used, options cannot be
            combined, or a package is missing.
    """
    before = SpecFile.of_earlier_run(out)
    for text in job.inputs:  # look for the first image of each
        next(sources.find([text]), None)
    if job.regions is not None:
        next(_regions(job), None)
    if job.reduce is not None:
        _check_reduce(job, job.reduce)
    else:
        nodes, dtype = job.spec.return_nodes, job.options.dtype or job.spec.precision
        keys = list(nodes.values() if isinstance(nodes, dict) else nodes)
        narrow = before is None and dtype == "bfloat16"  # an earlier run had no such outputs
        shards.shard_format(job.format, keys, [torch.bfloat16] if narrow else [])
    return before


def _check_reduce(job: Job, reduce: str) -> None:
    check_installed(reduce)
    if "top" in reduce:
        pool = job.options.pool
        advice = "run it separately with --pool none, avg, max, gem or cls"
        if pool in KINDS:
            raise FxError(
                f"--reduce top keeps one position per image, but --pool {pool} gives several rows per image; {advice}"
            )
        if "+" in pool or job.options.project is not None:
            other = f"--pool {pool}" if "+" in pool else "--project"
            raise FxError(
                f"--reduce top ranks images by a node's own channels, which {other} does not preserve; {advice}"
            )


def _regions(job: Job) -> Iterator[tuple[str, sources.Regions]]:
    assert job.regions is not None
    return regions.read(job.regions, cast(RegionPooling, job.options.pool))


def add_images(job: Job, found: Iterable[Source], index: Index) -> None:
    """Add the images of a job to the index, with their regions.

    Raises:
        FxError: the file of regions is invalid or names none of the images, or a finished image had other regions.
    """
    kind = KINDS.get(job.options.pool)
    if job.regions is None or kind is None:
        index.add(found)
        return
    index.add(found, _regions(job), kind.field)
    images, done, failed = index.counts()
    if not images:
        raise FxError(f"{job.regions} contains no {kind.field}")
    if failed == images and not done:
        path, reason = next(index.errors())
        raise FxError(f"none of the images in {job.regions} can be read; {path}: {reason}")


async def _run(batches: Batches, index: Index, writer: Writer | Reducer, report: Report) -> None:
    """Process all pending images: pass their rows to the writer in order."""
    images, done, unreadable = index.counts()
    report(images, done, unreadable)
    async with aclosing(batches.results(index.pending())) as results:
        try:
            async for result in results:
                await writer.add(result)
                done, unreadable = done + len(set(result.paths)), unreadable + len(result.errors)
                report(images, done, unreadable)
        finally:
            writer.close()  # keep finished work, however the run ends
