"""Extractors: finding, making, naming and deleting them, in this process and in the store that processes share."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from fxcore.errors import FxError
from service.engine.extractors.records import Records
from service.engine.extractors.resolving import Resolver
from service.engine.extractors.runtimes import Runtimes
from service.engine.extractors.sharing import CHECK_SECONDS, Sharing
from service.engine.extractors.store import Stored
from service.engine.record import ExtractorRecord
from service.engine.tasks import background
from service.engine.threads import RunInThread
from service.problems import Forbidden, NameTaken, NotReady, Problem, StoreFull
from service.schemas.specs import ExtractorSpec

NAMESAKE_SECONDS = 0.5


class Extractors:
    """All extractors of a service. For one event loop.

    What other processes made is made known here when it is asked for; what they deleted is forgotten when it is used,
    at most :data:`CHECK_SECONDS` later.

    Args:
        records: those that are known here.
        resolver: makes a record of a spec.
        runtimes: builds them.
        sharing: the store, if there is one.
    """

    def __init__(self, records: Records, resolver: Resolver, runtimes: Runtimes, sharing: Sharing | None) -> None:
        self._records = records
        self._resolver = resolver
        self._runtimes = runtimes
        self._sharing = sharing
        self._adopting: dict[str, asyncio.Task[ExtractorRecord | None]] = {}

    async def get(
        self, spec: ExtractorSpec, build: bool = True, keep: bool = False, trace_in: RunInThread | None = None
    ) -> tuple[ExtractorRecord, bool]:
        """Return the extractor that ``spec`` describes, and whether it is new. Its build has been started, not awaited.

        Args:
            spec: what to build.
            build: whether one may be made, and named.
            trace_in: runs in a thread what may trace the model; by default in one that builds extractors.
            keep: whether it must be in the store afterwards, if there is one. Otherwise a store that cannot be written
                is no error.

        Raises:
            FxError: the spec names something that does not exist or is not served.
            NameTaken: its name is another's.
            Forbidden: there is none and ``build`` is false.
            NotReady: the store cannot be written.
            StoreFull: it has as many extractors as it may.
        """
        record = await self._resolver.record(spec, trace_in)
        created = self._records.get(record.id) is None
        name, owner = spec.name if build else None, record.id
        if build:
            created, owner = await self._save(record, name, keep or name is not None)
        else:
            await self._require(record)
        if record.deleted:  # meanwhile, or by another process
            return await self.get(spec, build, keep, trace_in)
        known = self._records.get(record.id)
        if known is None:
            self._records.add(record)
        elif known is not record:  # another request was faster
            known.saved |= record.saved
            record, created = known, False
        if name is not None and owner == record.id:
            self._records.name(record, name)
        self._runtimes.ensure(record)
        if name is not None and owner != record.id:  # it was given to another since
            raise NameTaken(name, owner)
        return record, created

    async def _save(self, record: ExtractorRecord, name: str | None, keep: bool) -> tuple[bool, str]:
        """Have the store know ``record``, and claim ``name``. Extractors whose build failed give up their names.

        Without ``keep``, the store is asked at most once in :data:`CHECK_SECONDS`, and one that cannot be used or is
        full is no error.

        Returns:
            Whether it is new to all processes, and the extractor that has the name, if one is wanted.

        Raises:
            NameTaken: its name is another's.
            NotReady, StoreFull: see :meth:`get`.
        """
        new = self._records.get(record.id) is None
        if self._sharing is None:
            if name is not None:
                other = self._records.known(name)
                if other is not None and other.id != record.id and not self._gives_up(other.id, name):
                    raise NameTaken(name, other.id)
            return new, record.id
        if not keep and time.monotonic() - record.put_at < CHECK_SECONDS:
            return new, record.id
        record.put_at = time.monotonic()
        made = record.description
        spec = made.spec.model_copy(update={"weights": made.weights})
        stored = Stored(id=made.id, spec=spec, return_nodes=made.return_nodes, fingerprint=made.fingerprint)
        store, owner = self._sharing.store, record.id
        try:
            # What the store has needs no thread that writes, nor a store that can be written.
            there = not self._sharing.is_written(made.id) and await self._sharing.read(store.has, made.id)
            if name is not None or not there:
                await self._sharing.read(store.count)
            if name is not None:
                await self._sharing.read(store.check_name, name, record.id, self._gives_up)
            created = not there and await self._sharing.write(made.id, store.save, stored, keep)
            record.saved = True  # whatever comes of its name
            if created:
                self._records.free_names(record)
            if name is not None:
                owner = await self._sharing.write(record.id, store.claim, name, record.id, self._gives_up)
        except (NotReady, StoreFull):
            if keep:
                raise
            return new, record.id
        return created, owner

    def _gives_up(self, id: str, name: str) -> bool:
        """Return whether the extractor ``id`` gives up ``name``, as one whose build failed does."""
        record = self._records.get(id)
        return id != name and record is not None and record.state == "failed"

    async def _require(self, record: ExtractorRecord) -> None:
        """Check that ``record`` was made before, here or by another process.

        Raises:
            Forbidden: it was not.
        """
        known = await self.known(record.id)
        if known is not None and known.id == record.id:  # and not another that has this id for a name
            return
        if self._sharing is not None:
            with suppress(NotReady):
                if await self._sharing.find(record.id) == record.id:
                    record.saved = True
                    return
        spec = record.description.spec
        raise Forbidden(
            f"there is no extractor of these nodes of {spec.model} with these weights yet, "
            "and making one needs a key of scope admin; with one, POST /v1/extractors makes it"
        )

    async def known(self, id_or_name: str, again: bool = False) -> ExtractorRecord | None:
        """Return the extractor of that id or name that is known here, unless it was deleted or the name is another's.

        The store is read for it at most once in :data:`CHECK_SECONDS`, or ``again``. What is in memory is relied on
        where the store cannot be read.
        """
        record = self._records.known(id_or_name)
        if self._sharing is None or record is None or not record.saved:
            return record
        max_age = 0.0 if again else CHECK_SECONDS
        try:
            if await self._sharing.find(id_or_name, max_age, record.id) == record.id:
                return record
            if await self._sharing.find(record.id, max_age, record.id) is None:
                if self._records.get(record.id) is record:
                    self._forget(record)
            elif self._records.known(id_or_name) is record:
                self._records.free_name(id_or_name)
            return None
        except NotReady:
            return record

    async def look_up(self, id_or_name: str) -> ExtractorRecord:
        """Return the extractor of that id or name. If another process made it, its build is started here.

        Raises:
            UnknownExtractor: there is none.
            NotReady: there may be one, and the store cannot be read.
        """
        return await self._find(id_or_name) or self._records.find(id_or_name)

    async def namesake(self, model: str) -> ExtractorRecord | None:
        """Return the extractor that has a model's name, if there is one and the store can be read.

        Models are asked for often: a name that another process gave is noticed within :data:`NAMESAKE_SECONDS`.
        """
        try:
            return await self._find(model, NAMESAKE_SECONDS)
        except NotReady:
            return None

    async def _find(self, id_or_name: str, max_miss_age: float = 0.0) -> ExtractorRecord | None:
        """Return the extractor of that id or name; an earlier search that found none is relied on for a time."""
        record = await self.known(id_or_name)
        if record is not None or self._sharing is None:
            return record
        id = await self._sharing.find(id_or_name, max_miss_age)
        if id is None:
            return None
        adopting = self._adopting.get(id)
        if adopting is None:  # it is resolved once, for all that wait, and also where they leave
            adopting = self._adopting[id] = background(self._adopt(self._sharing, id), "adopt")
            adopting.add_done_callback(lambda done: done.cancelled() or done.exception())
        record = await asyncio.shield(adopting)
        if record is not None:
            record.saved = True  # though it may have been made here while the store was away
        if record is not None and id_or_name != id and self._records.get(id) is record:
            self._records.name(record, id_or_name)
        return record

    async def _adopt(self, sharing: Sharing, id: str) -> ExtractorRecord | None:
        """Return an extractor that the store has. If another process made it, it is made known, and its build is
        started; None if it was deleted meanwhile."""
        try:
            return self._records.get(id) or await self._made_known(sharing, id)
        finally:
            del self._adopting[id]

    async def _made_known(self, sharing: Sharing, id: str) -> ExtractorRecord | None:
        stored = await sharing.read(sharing.store.get, id)
        if stored is None:
            return None
        try:
            record = await self._resolver.record(stored.spec)
        except (FxError, Problem) as problem:
            raise NotReady(f"extractor {id}, which is in the store: {problem.detail}") from None
        if record.id != id:
            raise NotReady(
                f"extractor {id} was made where {stored.spec.model} is another graph, by another version of "
                "torchvision perhaps; make it anew here"
            )
        name = stored.spec.name
        named = name is not None and await sharing.find(name) == id
        known = self._records.get(id)
        if known is not None:  # a request for its nodes was faster
            return known
        if record.deleted:  # which made this one, and another deleted it
            return None
        record.saved = record.adopted = True
        self._records.add(record)
        if name is not None and named:
            self._records.name(record, name)
        self._runtimes.ensure(record)
        return record

    async def preload(self, spec: ExtractorSpec) -> ExtractorRecord | None:
        """Return the extractor that ``spec`` describes; None if it was preloaded before and deleted since.

        A process that replaces another must not restore deleted extractors.

        Raises:
            FxError: see :meth:`get`.
            NotReady: the store cannot be read.
        """
        if self._sharing is not None:
            id = (await self._resolver.record(spec)).id
            if await self._sharing.read(self._sharing.store.was_deleted, id):
                return None
        record, _ = await self.get(spec)
        if self._sharing is not None and record.saved:
            with suppress(NotReady):  # a store that cannot be written
                await self._sharing.write(record.id, self._sharing.store.mark_preloaded, record.id)
        return record

    async def elsewhere(self) -> list[tuple[Stored, str | None]]:
        """Return the extractors of the store that are not known here yet, each with one of its names. What others
        deleted is forgotten."""
        shared = [] if self._sharing is None else await self._sharing.all()
        ids = {stored.id for stored, _ in shared}
        for record in self._records.list():
            if record.saved and record.id not in ids:
                await self.known(record.id)
        return [(stored, name) for stored, name in shared if self._records.get(stored.id) is None]

    async def delete(self, id_or_name: str) -> None:
        """Delete an extractor in all processes. Its requests in flight finish normally.

        Raises:
            UnknownExtractor: there is none of that id or name.
            NotReady: the store cannot be read or written; nothing was deleted.
        """
        if self._sharing is None:
            self._forget(self._records.find(id_or_name))
            return
        record = await self.known(id_or_name, again=True)
        id = record.id if record is not None else await self._sharing.find(id_or_name)
        id = id or self._records.find(id_or_name).id
        await self._sharing.write(id, self._sharing.store.delete, id)
        record = self._records.get(id)
        if record is not None:  # else another request deleted it meanwhile, or only the store had it
            self._forget(record)

    def _forget(self, record: ExtractorRecord) -> None:
        self._records.remove(record)
        self._runtimes.discard(record)
