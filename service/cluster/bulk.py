"""``fxserve extract --ray``: the same extraction with a pool of actors on Ray Data.

The driver lists the images that are still pending. Blocks of their locations go through ``map_batches`` to actors, each
with an engine like that of a run on one machine, and ``write_parquet`` writes a file for each block. As in that run,
actors read the images themselves: an unreadable image becomes a row with an ``error`` (it would end
``ray.data.read_binary_files``), members of archives have the same paths, and images take no space in the object store.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
import ray
import ray.data
import ray.exceptions
from pyarrow.fs import FSSpecHandler, PyFileSystem

from fxcore.errors import FxError, summarize
from service.cluster.actors import Actor, EngineConfig, ExtractingActor, ReducingActor, describe, given_settings
from service.cluster.blocks import blocks_of
from service.cluster.reduced import merge_table
from service.cluster.rows import ERROR, Output, locked, schema_of
from service.offline import Job, Summary
from service.offline.failures import write_errors
from service.offline.folder import Folder
from service.offline.inputs import sources
from service.offline.inputs.skipped import Skipped
from service.offline.outputs import shards
from service.offline.outputs.index import Index
from service.offline.outputs.spec_file import SpecFile
from service.offline.outputs.working_folder import WorkingFolder
from service.offline.run import add_images, check, count, prepare
from service.offline.runners.runner import ExtractorInfo, Rows
from service.offline.statistics.reducer import Reduction
from service.offline.statistics.statistics import Statistics
from service.problems import Problem
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
        settings: settings of the engine in each actor; those not given are each node's own.
        address: address of a cluster; ``auto`` is the cluster this machine is part of, ``local`` starts one on this
            machine.

    Raises:
        FxError: the job is not possible, or the folder holds something else or cannot be written.
    """
    with _connected(address):
        return (_extract if job.reduce is None else _reduce)(job, settings, Folder(job.out))


def _extract(job: Job, settings: Settings, out: Folder) -> Summary:
    actors, info, probe = _started(replace(job, format="parquet"), settings, out)
    shards.shard_format("parquet", list(probe), [values.dtype for values in probe.values()])
    if ERROR in probe:
        raise FxError(f"an output cannot be named {ERROR!r}, the column for why an image has no features")
    made = SpecFile.of(info, job.options, FORMAT, probe)
    schema = schema_of(probe, made.metadata())
    with (
        ExitStack() as held,
        tempfile.TemporaryDirectory(prefix="fxserve-") as scratch,
        closing(Index(Path(scratch))) as index,
    ):
        skipped = Skipped(job.out)
        add_images(job, sources.find(job.inputs, skipped), index)
        lost = dict(index.errors())  # they get rows too
        index.forget_errors()
        with write_errors(out):
            made.write_or_check(out)
            held.enter_context(locked(out))
        output = Output(out, index, schema, None if job.regions is None else job.options.pool)
        output.look(keep_errors=False)
        if left := index.counts().left:
            row_bytes = max(1, sum(values.nbytes for values in probe.values()))
            rows = job.shard_rows or max(1, min(_MAX_ROWS, _MAX_BYTES // row_bytes))
            blocks = blocks_of(index, lost, actors.rows(left, rows))
            actors.map(blocks, ExtractingActor, made, schema, out.disk).write_parquet(
                out.root,
                filesystem=PyFileSystem(FSSpecHandler(out.fs)),
                ray_remote_args={"num_cpus": _WRITER_CPUS},
                schema=schema,
                compression="none",
            )
            output.look()
            counts = index.counts()
            if counts.left:
                raise FxError(
                    f"{counts.left} of {counts.images} images have no row in {out}; run the same command again to "
                    "compute them"
                )
        return Summary(made.outputs, *index.counts(), len(output.files), skipped)


def _reduce(job: Job, settings: Settings, out: Folder) -> Summary:
    """Reduce images to statistics. Actors reduce blocks, and the driver merges the results into the folder's index.

    The index is the same as that of a run without Ray, so each can resume the other.
    """
    assert job.reduce is not None
    actors, info, probe = _started(job, settings, out)
    empty = Statistics.empty(job.reduce, info.layouts, probe)
    made = SpecFile.of(info, job.options, job.format, probe, job.reduce)
    with write_errors(out):
        made.write_or_check(out)
        folder = WorkingFolder(out)
    try:
        with write_errors(out):
            skipped = prepare(job, None, folder, made)
        reduction = Reduction(folder, empty, made)
        if left := folder.index.counts().left:
            blocks = blocks_of(folder.index, {}, actors.rows(left, _MAX_ROWS))
            reduced = actors.map(blocks, ReducingActor, made)
            try:
                for table in reduced.iter_batches(batch_size=None, batch_format="pyarrow"):
                    merge_table(reduction, table)
            finally:
                reduction.finish()  # keep finished work, however the run ends
        return Summary(made.outputs, *folder.index.counts(), 0, skipped)
    finally:
        with write_errors(out):
            folder.close()


def _started(job: Job, settings: Settings, out: Folder) -> tuple[_Actors, ExtractorInfo, Rows]:
    """Build the extractor on one node. Return the actors for it, its description and the features of a fixed image.

    Raises:
        FxError: the job is not possible.
    """
    before = check(job, out)
    cores = settings.compute_threads if "compute_threads" in settings.model_fields_set else 1
    gpus, most = _room(cores, settings.device)
    backend = before.backend if before else None
    open_choice = settings.lowering and job.spec.backend == "auto" and backend is None
    images = count(job.inputs) // most if open_choice else 0
    engine = EngineConfig(given_settings(settings, cores), job.spec, job.options, backend, images)
    info, probe = ray.get(ray.remote(num_cpus=cores, num_gpus=gpus)(describe).remote(engine))
    if not info.one_size and not job.options.one_shape:
        raise FxError(
            "with --ray, the outputs of all images must have one shape; use --pool, --project, or --image-size"
        )
    return _Actors(replace(engine, backend=info.backend), cores, gpus, most), info, probe


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
        raise _of_ours(error) or FxError(f"--ray {address}: {_reason(error)}") from error
    finally:
        ray.shutdown()


def _reason(error: Exception) -> str:
    """Return the error of this program that ended an actor's constructor, which is in the last line; else the first."""
    last = str(error).strip().rpartition("\n")[2]
    return last.partition("FxError: ")[2] or summarize(error)


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


@dataclass(frozen=True)
class _Actors:
    """The actors of a run.

    Attributes:
        cores: cores of each.
        gpus: GPUs of each.
        most: number of actors that fit into the cluster.
    """

    engine: EngineConfig
    cores: int
    gpus: int
    most: int

    def rows(self, images: int, most: int) -> int:
        """Return the rows per block for ``images`` images: at most ``most``, and fewer to keep all actors busy."""
        return min(most, -(-images // (_BLOCKS_AN_ACTOR * self.most)))

    def map(self, blocks: Iterable[pyarrow.Table], actor: type[Actor], *arguments: Any) -> ray.data.Dataset:
        """Map blocks by actors made with the engine and ``arguments``."""
        stored: Any = [ray.put(block) for block in blocks]
        return ray.data.from_arrow_refs(stored).map_batches(
            actor,
            fn_constructor_args=(self.engine, *arguments),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=self.most),
            num_cpus=self.cores,
            num_gpus=self.gpus,
        )
