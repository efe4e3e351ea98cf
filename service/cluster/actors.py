"""The actors of ``fxserve extract --ray``: an engine on a node of the cluster, for blocks of images."""

from __future__ import annotations

import asyncio
import os
import platform
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# See service.app.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pyarrow

from fxcore.errors import FxError, summarize
from service.cluster.blocks import sources_of
from service.cluster.reduced import reduced_table
from service.cluster.rows import table_of
from service.engine import FeatureOptions
from service.offline.batches import Batches, Result, probe
from service.offline.inputs.reader import Reader
from service.offline.inputs.sources import Source
from service.offline.outputs.spec_file import FILE as SPEC_FILE
from service.offline.outputs.spec_file import SpecFile
from service.offline.runners.local import LocalRunner
from service.offline.runners.runner import ExtractorInfo, Rows
from service.offline.statistics.statistics import Statistics
from service.schemas.specs import ExtractorSpec
from service.settings import Settings


def given_settings(settings: Settings, cores: int) -> dict[str, Any]:
    """Return what ``settings`` were given, with threads for ``cores`` cores. Defaults depend on the machine."""
    given = settings.model_dump(include=settings.model_fields_set)
    return {"decode_threads": max(1, cores // 2)} | given | {"compute_threads": cores}


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of an actor's engine.

    Attributes:
        given: settings of the run; see :func:`given_settings`. The others are those of each node.
        backend: the backend that computed earlier rows; None to use the spec's.
        images: approximate number of images that it computes.
    """

    given: Mapping[str, Any]
    spec: ExtractorSpec
    options: FeatureOptions
    backend: str | None
    images: int

    def settings(self) -> Settings:
        """Return the settings on this node."""
        return Settings(**self.given)

    async def start(self) -> tuple[LocalRunner, Rows]:
        """Start the engine. Return it and the features of a fixed image.

        Raises:
            FxError: this node cannot run the engine, or build the extractor.
        """
        try:
            runner = LocalRunner(self.settings(), self.options, lambda: self.images, self.backend)
        except (ValueError, RuntimeError) as error:  # such as a device that this node lacks
            raise FxError(f"node {platform.node()} of the cluster: {summarize(error)}") from error
        await runner.start(self.spec)
        return runner, await probe(runner, self.options.pool)


def describe(engine: EngineConfig) -> tuple[ExtractorInfo, Rows]:
    """Start an engine. Return the description of its extractor and the features of a fixed image."""

    async def described() -> tuple[ExtractorInfo, Rows]:
        runner, probe = await engine.start()
        try:
            return runner.info, probe
        finally:
            await runner.close()

    return asyncio.run(described())


class Actor(ABC):
    """Maps blocks of images, one block at a time with several of its batches concurrently.

    Raises:
        FxError: the engine cannot be built on this node, or computes other values than where the run began.
    """

    def __init__(self, engine: EngineConfig, made: SpecFile) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fxserve-loop", daemon=True).start()
        self._made = made
        runner, self._probe = asyncio.run_coroutine_threadsafe(engine.start(), self._loop).result()
        other = SpecFile.of(runner.info, engine.options, made.format, self._probe, made.reduce)
        if differences := made.differences(other):
            raise FxError(f"node {platform.node()} of the cluster computes with {'; '.join(differences)}")
        self._layouts = runner.info.layouts
        self._batches = Batches(runner, Reader(engine.settings().max_body_bytes), self._probe)

    @abstractmethod
    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        """Return a block of results."""

    def _each(self, found: Sequence[Source], use: Callable[[Result], None]) -> None:
        """Compute the features of images, and call ``use`` with each result, in order."""

        async def each() -> None:
            async with aclosing(self._batches.results(iter([found]))) as results:
                async for result in results:
                    await asyncio.to_thread(use, result)

        asyncio.run_coroutine_threadsafe(each(), self._loop).result()


class ExtractingActor(Actor):
    """Computes the rows of blocks.

    Args:
        schema: schema of the rows.
        folder: the folder that the rows are written to; None if it is a bucket.
    """

    def __init__(self, engine: EngineConfig, made: SpecFile, schema: pyarrow.Schema, folder: Path | None) -> None:
        if folder is not None and not (folder / SPEC_FILE).exists():
            raise FxError(
                f"node {platform.node()} of the cluster does not see {folder}; --out must be a bucket or a folder that "
                "all nodes share"
            )
        super().__init__(engine, made)
        self._schema = schema

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        found, lost = sources_of(block)
        results: list[Result] = []
        self._each(found, results.append)
        return table_of([*results, Result([], {}, lost)], self._schema)


class ReducingActor(Actor):
    """Reduces blocks to statistics, each batch as soon as it is computed."""

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        assert self._made.reduce is not None
        found, errors = sources_of(block)
        statistics = Statistics.empty(self._made.reduce, self._layouts, self._probe)
        paths: list[str] = []

        def add(result: Result) -> None:
            added, refused = statistics.add(result)
            paths.extend(added)
            errors.extend(refused)

        self._each(found, add)
        return reduced_table(statistics, paths, errors)
