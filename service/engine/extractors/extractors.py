"""Extractors: finding, building, naming and deleting them.

An extractor costs a graph copy; the weights under it are shared, and so is the traced graph that it is a copy of. All
of them live under one memory budget, see :mod:`service.engine.memory.eviction`. An evicted extractor keeps its id,
its name and its description, and is built again by the next request for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress

import torch

from fxcore.errors import FxError
from service.engine.backends.upgrades import Upgrades
from service.engine.extractors.adoption import Adoption
from service.engine.extractors.naming import Naming
from service.engine.extractors.records import Records
from service.engine.extractors.resolving import Resolver
from service.engine.extractors.sharing import Sharing
from service.engine.extractors.store import Store, Stored
from service.engine.extractors.store_health import CHECK_SECONDS
from service.engine.memory.building import Builder
from service.engine.memory.collecting import Collector
from service.engine.memory.eviction import Eviction
from service.engine.memory.projections import Projections
from service.engine.memory.variants import Variants
from service.engine.memory.weights import ModelStore
from service.engine.placement import CompiledLimits
from service.engine.record import ExtractorRecord
from service.engine.runtime.ledger import Ledger
from service.engine.runtime.runtime import Runtime
from service.engine.tasks import background
from service.engine.threads import RunInThread
from service.observability.metrics import Metrics
from service.problems import ExtractorFailed, Forbidden, NotReady, Problem, StoreFull
from service.schemas.specs import MAX_NODES, ExtractorSpec

NAMESAKE_SECONDS = 0.5


class Extractors:
    """All extractors of a service. For one event loop; what takes time runs in ``pool``.

    Args:
        records: those that are known.
        models: the loaded weights.
        device: where extractors run.
        pool: the threads that trace and build.
        memory_budget: bytes that models and extractors may take; what is in use or pinned stays even above it.
        upgrades: searches for faster backends.
        metrics: where evictions are counted.
        allowed: the only models served; None for all.
        compiled: how many extractors OpenVINO may run at a time.
        store: the extractors that other processes know too.
        max_stored: extractors that the store may have.
        max_nodes: nodes that groups of names may stand for.

    Attributes:
        collector: collects those that were deleted or evicted.
        eviction: keeps them under the memory budget.
        sizes: the other input sizes of those with ``fit=native``.
        sharing: access to the store; None without one.
    """

    def __init__(
        self,
        records: Records,
        models: ModelStore,
        device: torch.device,
        pool: Executor,
        memory_budget: int,
        upgrades: Upgrades,
        metrics: Metrics,
        allowed: Sequence[str] | None = None,
        *,
        compiled: CompiledLimits,
        projections: Projections,
        store: Store | None = None,
        max_stored: int = 1,
        max_nodes: int = MAX_NODES,
    ) -> None:
        self.collector = Collector(pool)
        self._records = records
        self._resolver = Resolver(records, device, pool, allowed, max_nodes)
        ledger = Ledger()
        self.eviction = Eviction(
            models,
            self._records.values(),
            self.collector,
            ledger,
            memory_budget,
            metrics.evictions,
            compiled,
            projections,
        )
        upgrades.tools.on_upgrade = self._upgraded
        self._builder = Builder(models, upgrades.tools, pool, ledger, self.eviction.make_room, self.collector)
        self.variants = Variants(self._builder)
        self.sharing: Sharing | None = None
        self._adoption: Adoption | None = None
        if store is not None:
            self.sharing = Sharing(store, metrics, max_stored)
            self._adoption = Adoption(self.sharing, records, self._resolver.fresh, self.ensure, self._forget)
        self._naming = Naming(records, self.sharing)

    async def get(
        self, spec: ExtractorSpec, build: bool = True, keep: bool = False, trace_in: RunInThread | None = None
    ) -> tuple[ExtractorRecord, bool]:
        """Return the extractor that ``spec`` describes, and whether it is new. Its build has been started, not awaited.

        Args:
            spec: what to build.
            build: whether one may be made.
            trace_in: runs in a thread what may trace the model; by default in one that builds extractors.
            keep: whether it must be in the store afterwards, if there is one. Otherwise a store that cannot be written
                is no error.

        Raises:
            FxError: the spec names something that does not exist or is not served, or its name is another's.
            Forbidden: there is none and ``build`` is false.
            NotReady: the store cannot be written.
            StoreFull: it has as many extractors as it may.
        """
        record = await self._resolver.record(spec, trace_in)
        created = self._records.get(record.id) is None
        if not build:
            await self._require(record)
        elif self.sharing is not None:
            created = await self._save(self.sharing, record, spec.name, keep)
        elif created and spec.name is not None:
            self._naming.refuse_here(spec.name, record.id)
        if record.deleted:  # meanwhile, or by another process
            return await self.get(spec, build, keep, trace_in)
        known = self._records.get(record.id)
        if known is None:
            self._records.add(record)
        elif known is not record:  # another request was faster
            known.saved |= record.saved
            record, created = known, False
        if spec.name is not None:
            try:
                await self._naming.check(spec.name, record)
            except (FxError, Problem):
                if record.state == "building":  # it is known by now, without the name
                    self.ensure(record)
                raise
            self._records.name(record, spec.name)
        self.ensure(record)
        return record, created

    async def _require(self, record: ExtractorRecord) -> None:
        """Check that ``record`` was made before, here or by another process.

        Raises:
            Forbidden: it was not.
        """
        if await self.known(record.id) is not None:
            return
        if self.sharing is not None:
            with suppress(NotReady):
                if await self.sharing.get(record.id) is not None:
                    record.saved = True
                    return
        spec = record.description.spec
        raise Forbidden(
            f"there is no extractor of these nodes of {spec.model} with these weights yet, "
            "and making one needs a key of scope admin; with one, POST /v1/extractors makes it"
        )

    async def _save(self, sharing: Sharing, record: ExtractorRecord, name: str | None, keep: bool) -> bool:
        """Have the store know ``record``. Returns whether it is new to all processes.

        Without ``keep``, the store is asked at most once in :data:`CHECK_SECONDS`, and one that cannot be used or is
        full is no error.

        Raises:
            NameTaken: its name is another's.
            NotReady, StoreFull: see :meth:`get`.
        """
        new = self._records.get(record.id) is None
        if not keep and time.monotonic() - record.put_at < CHECK_SECONDS:
            return new
        record.put_at = time.monotonic()
        try:
            if new and name is not None:
                self._naming.refuse(name, record.id, await sharing.find(name))
                await sharing.check_names(name)
            created = await sharing.put(_stored(record), asked_for=keep)
        except (NotReady, StoreFull):
            if keep:
                raise
            return new
        record.saved = True
        if created:
            self._records.free_names(record)
        return created

    async def look_up(self, id_or_name: str) -> ExtractorRecord:
        """Return the extractor of that id or name. If another process made it, its build is started here.

        Raises:
            UnknownExtractor: there is none.
            NotReady: there may be one, and the store cannot be read.
        """
        record = self._records.known(id_or_name)
        if self._adoption is not None:
            record = await self._adoption.look_up(id_or_name)
        return record or self._records.find(id_or_name)

    async def known(self, id_or_name: str) -> ExtractorRecord | None:
        """Return the extractor of that id or name if this process knows it, and no other one has deleted it."""
        if self._adoption is None:
            return self._records.known(id_or_name)
        return await self._adoption.known(id_or_name)

    async def namesake(self, model: str) -> ExtractorRecord | None:
        """Return the extractor that has a model's name, if there is one and the store can be read.

        Models are asked for often: a name that another process gave is noticed within :data:`NAMESAKE_SECONDS`.
        """
        if self._adoption is None:
            return self._records.known(model)
        try:
            return await self._adoption.look_up(model, NAMESAKE_SECONDS)
        except NotReady:
            return None

    async def preload(self, spec: ExtractorSpec) -> ExtractorRecord | None:
        """Return the extractor that ``spec`` describes; None if it was preloaded before and deleted since.

        A process that replaces another must not restore deleted extractors.

        Raises:
            FxError: see :meth:`get`.
            NotReady: the store cannot be read.
        """
        if self.sharing is None:
            return (await self.get(spec))[0]
        if await self.sharing.was_deleted((await self._resolver.record(spec)).id):
            return None
        record, _ = await self.get(spec)
        if record.saved:
            with suppress(NotReady):  # a store that cannot be written
                await self.sharing.mark_preloaded(record.id)
        return record

    async def elsewhere(self) -> list[tuple[Stored, str | None]]:
        """Return the extractors of the store that are not known here yet, each with one of its names. What others
        deleted is forgotten."""
        shared = [] if self.sharing is None else await self.sharing.all()
        ids = {stored.id for stored, _ in shared}
        for record in self._records.list():
            if record.saved and record.id not in ids:
                await self.known(record.id)
        return [(stored, name) for stored, name in shared if self._records.get(stored.id) is None]

    def ensure(self, record: ExtractorRecord) -> None:
        """Start building ``record`` unless it is built, being built, or failed just now: a failed build is tried again
        once its back-off is over."""
        if record.runtime is None and record.build is None and record.retry_at <= time.monotonic():
            record.state, record.problem = "building", None
            record.build = background(self._build(record), "build")

    async def _build(self, record: ExtractorRecord) -> Runtime | None:
        """Build ``record``; afterwards it is ready or failed. Returns what the build gave to those who wait for it."""
        runtime = None
        try:
            runtime = await self._builder.build(record)
        except (FxError, Problem) as problem:
            record.fail(problem)
        finally:
            kept = record.build is asyncio.current_task()
            if kept:
                record.build = None
        if runtime is not None:
            record.state, record.failures = "ready", 0
            if kept and not record.deleted:
                record.runtime = runtime
            else:
                runtime.retire()
        self.eviction.make_room(0)
        return runtime

    async def load(self, record: ExtractorRecord) -> Runtime:
        """Wait until ``record`` is built and in memory, building it again if it was evicted or failed.

        Raises:
            FxError: the error of its build.
        """
        self.ensure(record)
        runtime = record.runtime
        if runtime is None and record.build is not None:
            build = record.build
            record.waiting += 1
            try:
                await asyncio.wait({build})
            finally:
                record.waiting -= 1
            runtime = None if build.cancelled() else build.result()
        if runtime is None:
            raise record.failure or NotReady(f"extractor {record.id} is not built")
        return runtime

    @asynccontextmanager
    async def use(self, record: ExtractorRecord) -> AsyncIterator[Runtime]:
        """Load ``record`` and keep it in memory inside an ``async with`` block.

        Raises:
            FxError: the error of its build.
        """
        runtime = await self.load(record)
        with runtime.in_use():
            yield runtime

    async def delete(self, id_or_name: str) -> None:
        """Delete an extractor in all processes. Its requests in flight finish normally.

        Raises:
            UnknownExtractor: there is none of that id or name.
            NotReady: the store cannot be read or written; nothing was deleted.
        """
        if self.sharing is None or self._adoption is None:
            self._forget(self._records.find(id_or_name))
            return
        record = await self._adoption.known(id_or_name, 0.0)
        id = record.id if record is not None else await self.sharing.find(id_or_name)
        id = id or self._records.find(id_or_name).id
        await self.sharing.delete(id)
        record = self._records.get(id)
        if record is not None:  # else another request deleted it meanwhile, or only the store had it
            self._forget(record)

    def _forget(self, record: ExtractorRecord) -> None:
        self._records.remove(record)
        record.deleted = True
        if record.build is not None and not record.waiting:
            _give_up(record, record.build)
        shared = any(other.description.model_key == record.description.model_key for other in self._records.values())
        self._release(record, None if shared else "deleted")

    def unload(self, id_or_name: str) -> None:
        """Free an extractor's memory; it stays known, and the next request for it builds it again.

        Its requests in flight finish normally. One that is being built for the first time is unloaded after its build,
        which tells its outputs.

        Raises:
            UnknownExtractor: there is none of that id or name.
        """
        record = self._records.find(id_or_name)
        if record.build is not None and not record.outputs:
            record.build.add_done_callback(lambda _: self._unload_built(record))
            return
        if record.build is not None:
            build, record.build = record.build, None
            if not record.waiting:
                build.cancel()
        if record.state == "building":
            record.state = "ready"  # the state of an evicted one
        record.pinned = False
        key = record.description.model_key
        others = (
            other for other in self._records.values() if other is not record and other.description.model_key == key
        )
        loaded = any(other.runtime is not None or other.build is not None for other in others)
        self._release(record, None if loaded else "unloaded")

    def _unload_built(self, record: ExtractorRecord) -> None:
        if record.runtime is not None and self._records.get(record.id) is record:
            self.unload(record.id)

    async def start(self) -> None:
        """Read the store for the first time."""
        if self.sharing is not None:
            await self.sharing.start()

    def close(self) -> None:
        """Stop evicting, and using the store."""
        if self.sharing is not None:
            self.sharing.close()
        for record in self._records.values():
            if record.build is not None:
                _give_up(record, record.build)
            if record.runtime is not None:
                record.runtime.stop()
        self.collector.close()
        self.eviction.close()

    def _upgraded(self) -> None:
        """Evict what another backend leaves no room for, and collect what it replaced."""
        self.eviction.make_room()
        self.collector.soon()

    def _release(self, record: ExtractorRecord, reason: str | None) -> None:
        """Free the memory of ``record``, which was deleted or unloaded; with a ``reason``, that of its weights as
        well."""
        runtime = record.runtime
        if record.deleted and runtime is not None:
            runtime.retire()  # for requests that have the record already, it goes on
        else:
            record.unload()
        if reason is not None:
            self.eviction.drop(record.description.model_key, reason)
        self.collector.soon()


def _stored(record: ExtractorRecord) -> Stored:
    made = record.description
    return Stored(made.id, made.spec.model_copy(update={"weights": made.weights}), made.return_nodes, made.fingerprint)


def _give_up(record: ExtractorRecord, build: asyncio.Task[Runtime | None]) -> None:
    build.cancel()
    record.build = None
    said = f"extractor {record.id} was deleted, or the service closed, before it was built"
    record.fail(ExtractorFailed(said, problem={"error": said}))
