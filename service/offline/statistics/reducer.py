"""Reduction of rows to statistics, which are kept in the index."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from service.engine.threads import compute_with
from service.offline.batches import Result
from service.offline.failures import write_errors
from service.offline.outputs.spec_file import SpecFile
from service.offline.outputs.working_folder import WorkingFolder
from service.offline.statistics.files import STATISTICS, write_statistics
from service.offline.statistics.statistics import Statistics

_SECONDS = 60.0
"""Minimum seconds between two commits: a killed run loses about this much work."""

_MAX_SHARE = 0.05
"""Maximum share of the time spent on commits, which are slow for large covariances."""

_MAX_IMAGES = 65536


class Reduction:
    """The statistics of a folder, including those of earlier runs.

    Images count once they are committed to the index. The files are written at the end.

    Args:
        folder: the folder of the files; its index keeps the statistics.
        statistics: empty statistics, for a new folder.
        spec: describes the statistics.
    """

    def __init__(self, folder: WorkingFolder, statistics: Statistics, spec: SpecFile) -> None:
        self._folder = folder
        self._spec = spec
        self._statistics = statistics
        if states := folder.index.statistics():
            statistics.outputs = Statistics.from_states(states).outputs
        self._paths: list[str] = []
        self._errors: list[tuple[str, str]] = []
        self._whole = True
        self._commit_at = time.monotonic() + _SECONDS

    def add(self, result: Result) -> None:
        """Add the features of some images."""
        self._whole = False
        self._added(*self._statistics.add(result))

    def merge(self, paths: Sequence[str], statistics: Statistics, errors: Sequence[tuple[str, str]]) -> None:
        """Add statistics of images that were reduced elsewhere.

        Args:
            paths: paths of the images.
            statistics: statistics of these images.
            errors: (path, reason) of images without features.
        """
        self._whole = False
        self._statistics.merge(statistics)
        self._added(paths, errors)

    def finish(self) -> None:
        """Commit all additions and write the files."""
        if not self._whole:  # a failure left the outputs with different images
            return
        self._commit()
        if images := self._folder.index.counts().done:
            with write_errors(self._folder):
                write_statistics(self._folder.path, self._statistics, self._spec, images)

    def _added(self, paths: Sequence[str], errors: Sequence[tuple[str, str]]) -> None:
        self._paths += paths
        self._errors += errors
        self._whole = True
        if time.monotonic() >= self._commit_at or len(self._paths) + len(self._errors) >= _MAX_IMAGES:
            self._commit()

    def _commit(self) -> None:
        began = time.monotonic()
        with write_errors(self._folder):
            self._folder.commit(STATISTICS, self._paths, self._errors, self._statistics.states())
        self._paths, self._errors = [], []
        ended = time.monotonic()
        self._commit_at = ended + max(_SECONDS, (ended - began) / _MAX_SHARE)


class Reducer:
    """Adds rows to ``reduction`` in a thread, one batch at a time while others are computed."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._thread = ThreadPoolExecutor(1, "fxserve-reduce", compute_with, (1,))
        self._adding: Future[None] | None = None

    async def add(self, result: Result) -> None:
        """Add the features of some images."""
        if self._adding is not None:
            await asyncio.shield(asyncio.wrap_future(self._adding))  # cancelling it does not cancel the addition
        self._adding = self._thread.submit(self._reduction.add, result)

    def close(self) -> None:
        """Finish the reduction. Blocks, so that nothing can cancel it."""
        try:
            if self._adding is not None:
                self._adding.result()
            self._thread.submit(self._reduction.finish).result()
        finally:
            self._thread.shutdown()
