"""``fxserve extract --ray``: the same extraction with a pool of actors on Ray Data.

The driver lists the images that are still pending. Blocks of their locations go through ``map_batches`` to actors, each
with an engine like that of a run on one machine, and ``write_parquet`` writes a file for each block. As in that run,
actors read the images themselves: an unreadable image becomes a row with an ``error`` (it would end
``ray.data.read_binary_files``), members of archives have the same paths, and images take no space in the object store.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# For actors; see service.app.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import orjson
import pyarrow
import ray
import ray.data
import ray.exceptions
from pyarrow.fs import FSSpecHandler, PyFileSystem

from fxcore.errors import FxError, summarize
from service.cluster.reduced import merge_table, reduced_table
from service.cluster.rows import ERROR, Output, locked, schema_of, table_of
from service.engine import FeatureOptions
from service.offline import Job, Summary
from service.offline.batches import Batches, Result, probe
from service.offline.failures import write_errors
from service.offline.folder import Folder
from service.offline.inputs import sources
from service.offline.inputs.reader import Reader
from service.offline.inputs.skipped import Skipped
from service.offline.inputs.sources import Source
from service.offline.outputs import shards
from service.offline.outputs.index import Index
from service.offline.outputs.spec_file import SpecFile
from service.offline.outputs.working_folder import WorkingFolder
from service.offline.run import add_images, check_reduce, check_regions, count, prepare
from service.offline.runners.local import LocalRunner
from service.offline.runners.runner import ExtractorInfo, RowLayout, Rows
from service.offline.statistics.reducer import Reduction
from service.offline.statistics.statistics import Statistics
from service.problems import Problem
from service.schemas.specs import ExtractorSpec
from service.settings import Settings

FORMAT = "parquet of Ray"
"""The format name in ``spec.json``. It differs from that of runs without Ray, which have their own index and would
compute everything again."""

_MAX_ROWS = 4096
_MAX_BYTES = 64 * 1024**2
_BLOCKS_AN_ACTOR = 4
"""Minimum blocks per actor, if there are enough images: while the last blocks are computed, the other actors are
idle."""

_WRITER_CPUS = 0.01
"""CPUs reserved for a task that writes a file: the cores are for the actors."""


def extract(job: Job, settings: Settings, address: str) -> Summary:
    """Run ``job`` on Ray, or resume an earlier run of it.

    Each actor uses ``FXSERVE_COMPUTE_THREADS`` cores (1 by default), and one GPU if the cluster has GPUs. As many
    actors are started as fit into the cluster.

    Args:
        job: the job. Its ``format`` is ignored: the files are Parquet.
        settings: settings of the engine in each actor.
        address: address of a cluster; ``auto`` is the cluster this machine is part of, ``local`` starts one on this
            machine.

    Raises:
        FxError: the job is not possible, or the folder holds something else or cannot be written.
    """
    with _connected(address):
        return (_extract if job.reduce is None else _reduce)(job, settings, Folder(job.out))


def _extract(job: Job, settings: Settings, out: Folder) -> Summary:
    before = SpecFile.read(out)
    check_regions(job)
    cores = settings.compute_threads if "compute_threads" in settings.model_fields_set else 1
    gpus, actors = _room(cores, settings.device)
    threads = {"compute_threads": cores, "decode_threads": max(1, cores // 2)}
    with (
        ExitStack() as held,
        tempfile.TemporaryDirectory(prefix="fxserve-") as scratch,
        closing(Index(Path(scratch))) as index,
    ):
        skipped = Skipped(job.out)
        add_images(job, sources.find(job.inputs, skipped), index)
        lost = dict(index.errors())  # they get rows too
        index.forget_errors()
        backend = before.backend if before else None
        images = index.counts()[0] // actors
        engine = _Engine(settings.model_copy(update=threads), job.spec, job.options, backend, images)
        info, probe = ray.get(ray.remote(num_cpus=cores, num_gpus=gpus)(_describe).remote(engine))
        _check(info, job.options, probe)
        made = SpecFile.of(info, job.options, FORMAT, probe)
        with write_errors(out):
            made.write_or_check(out)
            held.enter_context(locked(out))
        schema = schema_of(probe, made.metadata())
        output = Output(out, index, schema, None if job.regions is None else job.options.pool)
        output.look(keep_errors=False)
        images, done, unreadable = index.counts()
        left = images - done - unreadable
        if left:
            row_bytes = max(1, sum(values.nbytes for values in probe.values()))
            rows = job.shard_rows or max(1, min(_MAX_ROWS, _MAX_BYTES // row_bytes))
            rows = min(rows, -(-left // (_BLOCKS_AN_ACTOR * actors)))
            same = replace(engine, backend=info.backend)
            blocks: Any = [ray.put(block) for block in _blocks(index, lost, rows)]
            ray.data.from_arrow_refs(blocks).map_batches(
                _Actor,
                fn_constructor_args=(same, made, schema),
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors),
                num_cpus=cores,
                num_gpus=gpus,
            ).write_parquet(
                out.root,
                filesystem=PyFileSystem(FSSpecHandler(out.fs)),
                ray_remote_args={"num_cpus": _WRITER_CPUS},
                schema=schema,
                compression="none",
            )
            output.look()
            images, done, unreadable = index.counts()
            if left := images - done - unreadable:
                raise FxError(
                    f"{left} of {images} images have no row in {out}; run the same command again to compute them"
                )
        return Summary(made.outputs, images, done, unreadable, len(output.files), skipped)


def _reduce(job: Job, settings: Settings, out: Folder) -> Summary:
    """Reduce images to statistics. Actors reduce blocks, and the driver merges the results into the folder's index.

    The index is the same as that of a run without Ray, so each can resume the other.
    """
    assert job.reduce is not None
    before = SpecFile.read(out)
    check_regions(job)
    check_reduce(job)
    cores = settings.compute_threads if "compute_threads" in settings.model_fields_set else 1
    gpus, actors = _room(cores, settings.device)
    threads = {"compute_threads": cores, "decode_threads": max(1, cores // 2)}
    backend = before.backend if before else None
    images = count(job.inputs) // actors
    engine = _Engine(settings.model_copy(update=threads), job.spec, job.options, backend, images)
    info, probe = ray.get(ray.remote(num_cpus=cores, num_gpus=gpus)(_describe).remote(engine))
    _check_size(info, job.options)
    empty = Statistics.empty(job.reduce, info.layouts, probe)
    made = SpecFile.of(info, job.options, job.format, probe, job.reduce)
    with write_errors(out):
        made.write_or_check(out)
        folder = WorkingFolder(out)
    try:
        with write_errors(out):
            index = Index(folder.path)
        with closing(index):
            with write_errors(out):
                skipped = prepare(job, None, folder, index)
            reduction = Reduction(folder, index, empty, job.reduce, made.outputs, made.metadata())
            images, done, unreadable = index.counts()
            rows = min(_MAX_ROWS, -(-(images - done - unreadable) // (_BLOCKS_AN_ACTOR * actors)))
            blocks: Any = [ray.put(block) for block in _blocks(index, {}, max(1, rows))]
            if blocks:
                try:
                    reduced = ray.data.from_arrow_refs(blocks).map_batches(
                        _ReducingActor,
                        fn_constructor_args=(replace(engine, backend=info.backend), made, job.reduce, info.layouts),
                        batch_size=None,
                        batch_format="pyarrow",
                        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors),
                        num_cpus=cores,
                        num_gpus=gpus,
                    )
                    for table in reduced.iter_batches(batch_size=None, batch_format="pyarrow"):
                        merge_table(reduction, table)
                finally:
                    reduction.finish()  # keep finished work, however the run ends
            images, done, unreadable = index.counts()
    finally:
        with write_errors(out):
            folder.close()
    return Summary(made.outputs, images, done, unreadable, 0, skipped)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to the cluster, and convert errors raised there to errors of this program.

    Raises:
        FxError: the cluster cannot be reached, or something failed there.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise FxError(f"--ray {address}: {summarize(error)}; --ray local starts a cluster on this machine") from error
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = None  # keep our blocks, which hold all regions of an image
    context.print_on_execution_start, context.enable_progress_bars = False, sys.stderr.isatty()
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        yield
    except (ray.exceptions.RayError, OSError) as error:
        raise _of_ours(error) or FxError(f"--ray {address}: {summarize(error)}") from error
    finally:
        ray.shutdown()


def _of_ours(error: BaseException | None) -> FxError | None:
    """Return the error of this program that Ray has wrapped, if there is one."""
    while error is not None and not isinstance(error, FxError | Problem):
        error = getattr(error, "cause", None) or error.__cause__
    return None if error is None else FxError(error.detail, **error.extra)


def _room(cores: int, device: str) -> tuple[int, int]:
    """Return the GPUs per actor, and the number of actors that fit into the cluster.

    Raises:
        FxError: no actor fits.
    """
    listed: Any = ray.nodes
    nodes = [node["Resources"] for node in listed() if node["Alive"]]
    gpus = int(device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes))
    actors = sum(int(min(node.get("CPU", 0) // cores, node.get("GPU", 0) if gpus else 2**31)) for node in nodes)
    if not actors:
        raise FxError(f"no node of the cluster has {cores} cores (FXSERVE_COMPUTE_THREADS)")
    return gpus, actors


def _check(info: ExtractorInfo, options: FeatureOptions, probe: Rows) -> None:
    shards.shard_format("parquet", list(probe), [values.dtype for values in probe.values()])
    if ERROR in probe:
        raise FxError(f"an output cannot be named {ERROR!r}, the column for why an image has no features")
    _check_size(info, options)


def _check_size(info: ExtractorInfo, options: FeatureOptions) -> None:
    if not info.one_size and not options.one_shape:
        raise FxError(
            "with --ray, the outputs of all images must have one shape; use --pool, --project, or --image-size"
        )


def _blocks(index: Index, lost: Mapping[str, str], rows: int) -> Iterator[pyarrow.Table]:
    """Yield tables of the locations of pending images.

    A table has at most ``rows`` rows of features, unless a single image has more. Images in ``lost`` also have the
    reason.
    """
    some: list[Source] = []
    count = 0
    for source in itertools.chain.from_iterable(index.pending()):
        if some and count + source.rows > rows:
            yield _block(some, lost)
            some, count = [], 0
        some.append(source)
        count += source.rows
    if some:
        yield _block(some, lost)


def _block(some: Sequence[Source], lost: Mapping[str, str]) -> pyarrow.Table:
    regions = [None if source.regions is None else orjson.dumps(source.regions) for source in some]
    return pyarrow.table(
        {
            "path": pyarrow.array([source.path for source in some], pyarrow.large_string()),
            "file": pyarrow.array([source.file.encode("utf-8", "surrogateescape") for source in some]),
            "offset": pyarrow.array([source.offset for source in some], pyarrow.int64()),
            "size": pyarrow.array([source.size for source in some], pyarrow.int64()),
            "regions": pyarrow.array(regions, pyarrow.large_binary()),
            "error": pyarrow.array([lost.get(source.path) for source in some], pyarrow.string()),
        }
    )


@dataclass(frozen=True)
class _Engine:
    """The configuration of an actor's engine.

    Attributes:
        backend: the backend that computed earlier rows; None to use the spec's.
        images: approximate number of images that it computes.
    """

    settings: Settings
    spec: ExtractorSpec
    options: FeatureOptions
    backend: str | None
    images: int

    async def start(self) -> tuple[LocalRunner, Rows]:
        """Start the engine. Return it and the features of a fixed image."""
        runner = LocalRunner(self.settings, self.options, self.images, self.backend)
        await runner.start(self.spec)
        return runner, await probe(runner, self.options.pool)


def _describe(engine: _Engine) -> tuple[ExtractorInfo, Rows]:
    async def describe() -> tuple[ExtractorInfo, Rows]:
        runner, probe = await engine.start()
        try:
            return runner.info, probe
        finally:
            await runner.close()

    return asyncio.run(describe())


class _Actor:
    """Computes the rows of blocks of images, one block at a time with several of its batches concurrently.

    Raises:
        FxError: the engine cannot be built on this node, or computes other values than where the run began.
    """

    def __init__(
        self, engine: _Engine, made: SpecFile, schema: pyarrow.Schema | None, reduce: str | None = None
    ) -> None:
        self._schema = schema
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fxserve-loop", daemon=True).start()
        runner, probe = asyncio.run_coroutine_threadsafe(engine.start(), self._loop).result()
        format = FORMAT if reduce is None else made.format
        other = SpecFile.of(runner.info, engine.options, format, probe, reduce)
        if differences := made.differences(other):
            node = ray.get_runtime_context().get_node_id()
            raise FxError(f"node {node} of the cluster computes with {'; '.join(differences)}")
        self._probe = probe
        self._batches = Batches(runner, Reader(engine.settings.max_body_bytes), probe)

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        found, lost = _sources(block)
        results = asyncio.run_coroutine_threadsafe(self._results(found), self._loop).result()
        return table_of([*results, Result([], [], lost)], self._schema)

    async def _results(self, found: list[Source]) -> list[Result]:
        room = asyncio.Semaphore(self._batches.concurrency)

        async def result(batch: Sequence[Source]) -> Result:
            async with room:
                return await self._batches.run(batch)

        return await asyncio.gather(*map(result, self._batches.split(found)))


class _ReducingActor(_Actor):
    """Reduces blocks of images to statistics, each batch as soon as it is computed."""

    def __init__(self, engine: _Engine, made: SpecFile, reduce: str, layouts: Mapping[str, RowLayout]) -> None:
        super().__init__(engine, made, None, reduce)
        self._reduce = reduce
        self._layouts = layouts

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        found, lost = _sources(block)
        statistics = Statistics.empty(self._reduce, self._layouts, self._probe)
        paths, errors = asyncio.run_coroutine_threadsafe(self._reduced(found, statistics), self._loop).result()
        return reduced_table(statistics, paths, [*lost, *errors])

    async def _reduced(self, found: list[Source], statistics: Statistics) -> tuple[list[str], list[tuple[str, str]]]:
        room, adding = asyncio.Semaphore(self._batches.concurrency), asyncio.Lock()
        paths: list[str] = []
        errors: list[tuple[str, str]] = []

        async def add(batch: Sequence[Source]) -> None:
            async with room:
                result = await self._batches.run(batch)
                async with adding:
                    added, refused = await asyncio.to_thread(
                        statistics.add_parts, result.paths, result.rows, self._layouts
                    )
                paths.extend(added)
                errors.extend([*result.errors, *refused])

        await asyncio.gather(*map(add, self._batches.split(found)))
        return paths, errors


def _sources(block: pyarrow.Table) -> tuple[list[Source], list[tuple[str, str]]]:
    """Return the images of a block, and (path, reason) of those that cannot be read."""
    found, lost = [], []
    for row in block.to_pylist():
        if row["error"] is not None:
            lost.append((row["path"], row["error"]))
        else:
            file = row["file"].decode("utf-8", "surrogateescape")
            regions = None if row["regions"] is None else orjson.loads(row["regions"])
            found.append(Source(row["path"], file, row["offset"], row["size"], regions=regions))
    return found, lost
