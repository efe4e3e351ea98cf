"""Building, lending and freeing the runtimes of extractors.

A runtime costs a graph copy; its weights and the traced graph it was copied from are shared. All runtimes share one
memory budget, see :mod:`service.engine.lifecycle.eviction`. An evicted extractor keeps its id, name and description,
and is built again by its next request.
"""

from __future__ import annotations

import asyncio
import time

from fxcore.errors import FxError
from service.engine.lifecycle.building import Builder
from service.engine.lifecycle.eviction import Eviction
from service.engine.lifecycle.records import Records
from service.engine.record import ExtractorRecord, Failed
from service.engine.runtime.collecting import Collector
from service.engine.runtime.runtime import Runtime
from service.engine.tasks import background
from service.problems import ExtractorFailed, NotReady, Problem


class Runtimes:
    """The runtimes of all extractors. For one event loop.

    Args:
        records: the known extractors.
        builder: builds them.
        eviction: enforces the memory budget.
        collector: garbage-collects deleted and evicted runtimes.
    """

    def __init__(self, records: Records, builder: Builder, eviction: Eviction, collector: Collector) -> None:
        self._records = records
        self._builder = builder
        self._eviction = eviction
        self._collector = collector

    def ensure(self, record: ExtractorRecord) -> None:
        """Start building ``record`` unless it is built, being built, or failed recently.

        A failed build is retried after its back-off.
        """
        phase = record.phase
        if phase is None or (isinstance(phase, Failed) and phase.retry_at <= time.monotonic()):
            record.phase = background(self._build(record), "build")

    async def _build(self, record: ExtractorRecord) -> Runtime | None:
        """Build ``record``, which is ready or failed afterwards. Return the runtime to the requests waiting for it."""
        runtime = None
        try:
            runtime = record.phase = await self._builder.build(record)
            record.failures = 0
        except (FxError, Problem) as problem:
            record.fail(problem)
        if self._records.get(record.id) is not record:  # eviction would not find it
            record.retire()
        self._eviction.make_room()
        return runtime

    async def load(self, record: ExtractorRecord, timeout: float | None = None) -> Runtime:
        """Return the runtime of ``record``, waiting for its build. If it was evicted or failed, build it again.

        Hold :meth:`Runtime.in_use` over its use, before the next ``await``: it may be evicted otherwise.

        Raises:
            FxError: the error of its build.
            NotReady: it takes longer than ``timeout`` seconds.
        """
        self.ensure(record)
        runtime, build = record.runtime, record.build
        if build is not None:
            await self.wait(record, timeout)
            if not build.done():
                raise NotReady(f"extractor {record.id} is still being built")
            runtime = None if build.cancelled() else build.result()
        if runtime is None:
            raise record.failure or NotReady(f"extractor {record.id} is not built")
        return runtime

    async def wait(self, record: ExtractorRecord, timeout: float | None = None) -> None:
        """Wait until ``record`` is built or has failed, at most ``timeout`` seconds. Nobody cancels the build then."""
        if record.build is not None:
            record.waiting += 1
            try:
                await asyncio.wait({record.build}, timeout=timeout)
            finally:
                record.waiting -= 1

    def unload(self, record: ExtractorRecord) -> None:
        """Free an extractor's memory. It stays known, and its next request builds it again.

        In-flight requests finish normally. It is unloaded after its build if requests wait for that, or if that is its
        first one, which is needed to know its outputs. Any other build is cancelled.
        """
        record.pinned = False
        if record.build is not None and (record.waiting or not record.outputs):
            record.build.add_done_callback(lambda _: self._unload_built(record))
            return
        record.cancel()
        loaded = any(other.runtime is not None or other.build is not None for other in self._others(record))
        record.retire()
        if not loaded:
            self._eviction.forget_weights(record.description.model_key, "unloaded")
        self._collector.soon()

    def _unload_built(self, record: ExtractorRecord) -> None:
        if record.runtime is not None and not record.deleted:
            self.unload(record)

    def forget(self, record: ExtractorRecord) -> None:
        """Delete an extractor and free its memory. In-flight requests finish normally."""
        self._records.forget(record)
        record.deleted = True
        if not record.waiting:
            record.cancel()
        if record.runtime is not None:
            record.runtime.retire()  # kept for requests that already hold the record
        if not self._others(record):
            self._eviction.forget_weights(record.description.model_key, "deleted")
        self._collector.soon()

    def close(self) -> None:
        """Stop building and evicting."""
        for record in self._records.values():
            if record.build is not None:
                record.cancel()
                said = f"the service closed before extractor {record.id} was built"
                record.fail(ExtractorFailed(said, problem={"error": said}))
            if record.runtime is not None:
                record.runtime.retire()
        self._collector.close()
        self._eviction.close()

    def _others(self, record: ExtractorRecord) -> list[ExtractorRecord]:
        """Return the other extractors that use the weights of ``record``."""
        key = record.description.model_key
        return [other for other in self._records.values() if other is not record and other.description.model_key == key]
