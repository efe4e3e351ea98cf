"""The extractors there are: finding, building, naming and forgetting them.

An extractor costs a graph copy; the weights under it are shared, and so is the traced graph that it is a copy of. All
of them live under one memory budget, see :mod:`service.engine.registry.eviction`. An evicted extractor keeps its id,
its name and its description, and is built again by the next request for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import torch

from fxcore.errors import FxError
from service.engine.backends.upgrade import Upgrades
from service.engine.device.threads import in_pool
from service.engine.errors import Forbidden, NameTaken, NotReady, UnknownExtractor
from service.engine.record import ExtractorRecord
from service.engine.registry.building import build as build_record
from service.engine.registry.deleted import Deleted
from service.engine.registry.eviction import Eviction
from service.engine.registry.forgetting import forgettable
from service.engine.registry.names import Names
from service.engine.registry.resolving import resolve
from service.engine.registry.sharing import Known, Sharing
from service.engine.registry.store import Store, Stored, is_id
from service.engine.registry.weights import ModelStore
from service.garbage import tidy
from service.observability.metrics import Metrics
from service.schemas.v1 import ExtractorSpec

log = logging.getLogger("fxserve.extractors")

NAMESAKE_SECONDS = 0.5

_REMEMBERED_SPECS = 4096


class Extractors:
    """All extractors of a service. For one event loop; what takes time runs in ``pool``.

    Args:
        models: the loaded weights.
        device: where extractors run.
        pool: the threads that trace and build.
        memory_budget: bytes that models and extractors may take; what is in use or pinned stays even above it.
        upgrades: decides what runs an extractor.
        metrics: where evictions are counted.
        allowed: the only models served; None for all.
        most_compiled: extractors that OpenVINO may run at a time.
        store: what is shared with other processes.

    Attributes:
        eviction: keeps them under the memory budget.
    """

    def __init__(
        self,
        models: ModelStore,
        device: torch.device,
        pool: Executor,
        memory_budget: int,
        upgrades: Upgrades,
        metrics: Metrics,
        allowed: Sequence[str] | None = None,
        *,
        most_compiled: int,
        store: Store | None = None,
    ) -> None:
        self._upgrades = upgrades
        self._evictions = metrics.evictions
        self._deleted = Deleted(pool)
        self._models = models
        self._device = device
        self._pool = pool
        self._allowed = None if allowed is None else frozenset(allowed)
        self._records: dict[str, ExtractorRecord] = {}
        self.eviction = Eviction(models, self._records.values(), pool, memory_budget, metrics.evictions, most_compiled)
        upgrades.on_upgrade = self.eviction.make_room
        self._names = Names()
        self._adoptions: dict[str, asyncio.Task[ExtractorRecord]] = {}
        self._sharing: Sharing | None = None
        if store is not None:
            self._sharing = Sharing(store, metrics, self._known_of_store, self._forget_deleted, self._names.free)
        # The one-step route asks with the same few specs again and again: resolving those is a look-up.
        self._resolved: OrderedDict[bytes, str] = OrderedDict()

    async def get(self, spec: ExtractorSpec, build: bool = True, keep: bool = False) -> tuple[ExtractorRecord, bool]:
        """The extractor that ``spec`` describes, and whether it is new. Its build has been started, not awaited.

        Args:
            spec: what to build.
            build: whether one may be made.
            keep: whether it has to be in the store afterwards, where there is one. What is only computed with is kept
                there when that is possible.

        Raises:
            FxError: the spec names something that does not exist or is not served, or its name is another's.
            Forbidden: there is none and ``build`` is false.
            NotReady: it cannot be kept.
        """
        key = hashlib.sha256(spec.model_dump_json(exclude={"name"}).encode()).digest()
        record = self._records.get(self._resolved.get(key, ""))
        created = False
        if record is None:
            fresh = await in_pool(self._pool, resolve, spec, self._device, self._allowed)
            record = self._records.get(fresh.id)
            if record is None:
                record, created = await self._add(fresh, build, keep)
                keep = False
            self._resolved[key] = record.id
            if len(self._resolved) > _REMEMBERED_SPECS:
                self._resolved.popitem(last=False)
        if keep and self._sharing is not None:
            stored, created = await self._sharing.put(record)  # another process may have deleted it just now
            if stored.token != record.token:
                record.token = stored.token
                self._names.forget(record.id)
        if spec.name is not None:
            await self._check_name(spec.name, record)
            self._name(record, spec.name)
        self.ensure(record)
        return record, created

    async def _add(self, fresh: ExtractorRecord, build: bool, keep: bool) -> tuple[ExtractorRecord, bool]:
        """Make ``fresh`` known, unless it is by now or ``build`` is false; what is known then, and whether it is new
        to all processes."""
        created = True
        if self._sharing is not None:
            try:
                if not build:
                    stored = await self._sharing.get(fresh.id)
                else:
                    if fresh.name is not None:
                        self._refuse_name(fresh.name, fresh.id, await self._sharing.owner(fresh.name))
                    stored, created = await self._sharing.put(fresh)
                if stored is not None:
                    build, fresh.token = True, stored.token
            except NotReady:
                if keep:
                    raise
        if not build:
            raise Forbidden(
                f"there is no extractor of these nodes of {fresh.spec.model} with these weights yet, and making one "
                "needs a key of scope admin; with one, POST /v1/extractors makes it"
            )
        known = self._records.get(fresh.id)  # somebody else may have been as fast
        if known is not None:
            return known, False
        if fresh.name is not None and self._sharing is None:
            await self._check_name(fresh.name, fresh)
        self._remember(fresh)
        return fresh, created

    def _remember(self, record: ExtractorRecord) -> None:
        for unused in forgettable(self._records.values(), self._names.bytes):
            self._remove(unused)
            self._evictions.labels("record", "unused").inc()
        self._records[record.id] = record

    async def look_up(self, id_or_name: str) -> ExtractorRecord:
        """The extractor of that id or name, which another process may have made: then it is being built here now.

        Raises:
            UnknownExtractor: there is none.
            NotReady: there may be one, and the store cannot be read.
        """
        return await self._look_up(id_or_name) or self.find(id_or_name)

    async def namesake(self, model: str) -> ExtractorRecord | None:
        """The extractor that has a model's name, if there is one and the store can be read.

        A model is asked for again and again: that another process gave its name to an extractor is noticed within
        :data:`NAMESAKE_SECONDS`.
        """
        try:
            return await self._look_up(model, NAMESAKE_SECONDS)
        except NotReady:
            return None

    async def _look_up(self, id_or_name: str, believe: float = 0.0) -> ExtractorRecord | None:
        record = self.known(id_or_name)
        if record is None and self._sharing is not None:
            stored = await self._sharing.find(id_or_name, believe)
            if stored is not None:
                record = await self._adopt(stored)
                if id_or_name != record.id:
                    self._name(record, id_or_name)
        return record

    async def _adopt(self, stored: Stored) -> ExtractorRecord:
        """The extractor that another process made, known here from now on; resolved once, however many ask."""
        adoption = self._adoptions.get(stored.id)
        if adoption is None:
            adoption = self._adoptions[stored.id] = asyncio.create_task(self._resolve_stored(stored))
            adoption.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(adoption)

    async def _resolve_stored(self, stored: Stored) -> ExtractorRecord:
        assert self._sharing is not None
        try:
            record = self._records.get(stored.id)
            if record is None:
                try:
                    fresh = await in_pool(self._pool, resolve, stored.spec, self._device, self._allowed)
                except FxError as problem:
                    raise NotReady(f"extractor {stored.id}, which is in the store: {problem.detail}") from None
                if fresh.id != stored.id:
                    raise NotReady(
                        f"extractor {stored.id} was made where {stored.spec.model} is another graph, by another "
                        "version of torchvision perhaps; make it anew here"
                    )
                owner = None if fresh.name is None else await self._sharing.owner(fresh.name)
                now = await self._sharing.get(stored.id)
                if now is None:  # deleted meanwhile
                    return self.find(stored.id)
                record = self._records.get(stored.id)
                if record is None:
                    name, fresh.name, fresh.token, fresh.adopted = fresh.name, None, now.token, True
                    self._remember(fresh)
                    if name is not None and owner is not None and owner.id == stored.id:
                        self._name(fresh, name)
                    record = fresh
            self.ensure(record)
            return record
        finally:
            del self._adoptions[stored.id]

    async def preload(self, spec: ExtractorSpec) -> ExtractorRecord | None:
        """The extractor that ``spec`` describes; None where it was deleted in the last day and not made again since.

        A process that takes another's place must not bring back what was deleted.

        Raises:
            FxError: see :meth:`get`.
        """
        if self._sharing is not None:
            fresh = await in_pool(self._pool, resolve, spec, self._device, self._allowed)
            if self._sharing.was_deleted(fresh.id) and await self._sharing.get(fresh.id) is None:
                return None
        return (await self.get(spec))[0]

    async def elsewhere(self) -> list[tuple[Stored, str | None]]:
        """The extractors of the store that are not known here yet, each with a name that it has."""
        shared = [] if self._sharing is None else await self._sharing.all()
        return [(stored, name) for stored, name in shared if stored.id not in self._records]

    def ensure(self, record: ExtractorRecord) -> None:
        """Start building ``record`` unless it is built or being built. A failed build is tried again."""
        if record.run is None and record.build is None:
            record.state = "building"
            record.problem = None
            record.build = asyncio.create_task(
                build_record(record, self._models, self._upgrades, self._pool, self.eviction.make_room)
            )

    def known(self, id_or_name: str) -> ExtractorRecord | None:
        """The extractor of that id or name, if there is one."""
        return self._records.get(id_or_name) or self._records.get(self._names.id(id_or_name) or "")

    def find(self, id_or_name: str) -> ExtractorRecord:
        """The extractor of that id or name.

        Raises:
            UnknownExtractor: there is none. What was meant is looked for, which takes longer than finding one does.
        """
        record = self.known(id_or_name)
        if record is None:
            suggestions = self._names.near(id_or_name, reversed(self._records))
            hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; POST /v1/extractors makes one"
            raise UnknownExtractor(f"there is no extractor {id_or_name!r}{hint}", suggestions=suggestions)
        return record

    def list(self) -> list[ExtractorRecord]:
        """All extractors, in the order they were made."""
        return list(self._records.values())

    async def delete(self, id_or_name: str) -> None:
        """Forget an extractor, in all processes. Requests that are on their way through it end normally.

        Raises:
            UnknownExtractor: there is none of that id or name.
            NotReady: the store cannot be written.
        """
        record = self.known(id_or_name)
        if self._sharing is not None and (record is None or record.token is not None):
            stored = await (self._sharing.find(id_or_name) if record is None else self._sharing.get(record.id))
            if stored is not None:
                await self._sharing.delete(stored.id)
            if record is None and stored is not None:
                record = self._records.get(stored.id)
                if record is None:
                    return
        record = record or self.find(id_or_name)
        if self._records.get(record.id) is record:  # else it was deleted twice at a time
            self._forget(record)

    def _forget(self, record: ExtractorRecord) -> None:
        self._remove(record)
        self._upgrades.forget(record)
        shared = any(other.model_key == record.model_key for other in self._records.values())
        self._let_go(record, None if shared else "deleted")

    def _forget_deleted(self, tokens: Mapping[str, str]) -> None:
        for id, token in tokens.items():
            record = self._records.get(id)
            if record is not None and record.token == token:  # else it was made anew while that was found out
                self._forget(record)

    def _known_of_store(self) -> Known:
        records = self._records.values()
        tokens = {record.id: record.token for record in records if record.token is not None}
        return Known(tokens, [record for record in records if record.token is None])

    def unload(self, id_or_name: str) -> None:
        """Give back what an extractor holds in memory; it stays known, and the next request for it builds it again.

        Requests that are on their way through it end normally: they go on with what is given back. One that is being
        built for the first time is unloaded once that is done, as nothing could be said of it before.

        Raises:
            UnknownExtractor: there is none of that id or name.
        """
        record = self.find(id_or_name)
        if record.build is not None and not record.outputs:
            record.build.add_done_callback(lambda _: self._unload_built(record))
            return
        empty: dict[str, Any] = dict.fromkeys(("extractor", "run", "upgrade", "check", "build", "held"))
        if record.state == "building":
            empty["state"] = "ready"  # as it is while it is not in memory
        self._records[record.id] = replace(record, **empty, images=0, users=0, pinned=False)
        record.forget_sizes()
        self._upgrades.forget(record)
        others = (other for other in self._records.values() if other.model_key == record.model_key)
        loaded = any(other.run is not None or other.build is not None for other in others)
        self._let_go(record, None if loaded else "unloaded")

    def _unload_built(self, record: ExtractorRecord) -> None:
        if record.run is not None and self._records.get(record.id) is record:
            self.unload(record.id)

    async def start(self) -> None:
        """Read the store for the first time, and begin to watch it."""
        if self._sharing is not None:
            await self._sharing.start()

    def never_opened(self) -> str | None:
        """Why nothing is known of the store, where that is so."""
        return None if self._sharing is None else self._sharing.never_opened

    def store_trouble(self) -> str | None:
        """What is wrong with the store; what is in memory serves nevertheless."""
        return None if self._sharing is None else self._sharing.trouble()

    def close(self) -> None:
        """Make no more room, and watch the store no longer."""
        if self._sharing is not None:
            self._sharing.close()
        self._deleted.close()
        self.eviction.close()

    def _remove(self, record: ExtractorRecord) -> None:
        del self._records[record.id]
        self._names.forget(record.id)

    def _let_go(self, record: ExtractorRecord, reason: str | None) -> None:
        """Free what ``record``, which is known no more, holds; its weights as well where there is a ``reason`` to."""
        if reason is not None:
            self.eviction.drop(record.model_key, reason)
        if reason is not None and not record.active:
            self._pool.submit(tidy)
        else:
            self._deleted.add(record)

    def _name(self, record: ExtractorRecord, name: str) -> None:
        before = self.known(name)
        self._names.give(name, record.id)
        record.name = name
        if before is not None and before is not record:
            before.name = self._names.last(before.id)

    async def _check_name(self, name: str, record: ExtractorRecord) -> None:
        """Have ``name`` for ``record``: what failed gives up its names to whoever asks for them.

        Raises:
            NameTaken: it is another's.
        """
        if self._sharing is None or record.token is None:
            owner = self.known(name)
            self._refuse_name(name, record.id, owner)
            return
        stored = Stored(record.id, record.token, record.spec, record.return_nodes, record.fingerprint)
        self._refuse_name(name, record.id, await self._sharing.get(name) if is_id(name) else None)
        id = await self._sharing.claim(name, stored, self._gives_up_names)
        if id != record.id:
            raise _taken(name, id)

    def _gives_up_names(self, id: str) -> bool:
        record = self._records.get(id)
        return record is not None and record.state == "failed"

    def _refuse_name(self, name: str, id: str, owner: ExtractorRecord | Stored | None) -> None:
        """Refuse ``name`` to the extractor ``id`` where it is another's.

        Raises:
            NameTaken: it is.
        """
        if owner is not None and owner.id != id and (owner.id == name or not self._gives_up_names(owner.id)):
            raise _taken(name, owner.id)


def _taken(name: str, id: str) -> NameTaken:
    return NameTaken(
        f"the name {name!r} is taken by extractor {id}; choose another name or delete that extractor",
        name=name,
        extractor=id,
    )
