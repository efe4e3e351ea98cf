"""Finding, creating, naming and deleting extractors, in this process and in the store that processes share."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from fxcore.errors import BadTensor, FxError, WeightsUnavailable
from service.engine.extractors.resolving import Resolver
from service.engine.extractors.sharing import CHECK_SECONDS, Sharing
from service.engine.extractors.store import Stored
from service.engine.lifecycle.records import Records
from service.engine.lifecycle.runtimes import Runtimes
from service.engine.record import ExtractorRecord
from service.engine.tasks import SingleFlight
from service.engine.threads import RunInThread
from service.problems import ExtractorFailed, Forbidden, NameTaken, NotReady, Problem, StoreFull
from service.schemas.specs import ExtractorSpec

NAMESAKE_SECONDS = 0.5


class Extractors:
    """The extractors of a service. For one event loop.

    An extractor that another process created becomes known here when it is requested. One that another process deleted
    is forgotten when it is next used, at most :data:`CHECK_SECONDS` later.

    Args:
        records: the extractors known to this process.
        resolver: turns a spec into a description.
        runtimes: builds them.
        sharing: the shared store, if there is one.
    """

    def __init__(self, records: Records, resolver: Resolver, runtimes: Runtimes, sharing: Sharing | None) -> None:
        self._records = records
        self._resolver = resolver
        self._runtimes = runtimes
        self._sharing = sharing
        self._adopting = SingleFlight[str, ExtractorRecord | None]("adopt", keep=False)  # the records have them

    async def get(
        self,
        spec: ExtractorSpec,
        wait: float = 0.0,
        *,
        build: bool = True,
        keep: bool = False,
        trace_in: RunInThread | None = None,
    ) -> tuple[ExtractorRecord, bool]:
        """Return the extractor that ``spec`` describes, and whether it is new. Its build is started.

        A failed build is not raised: see the record's ``state`` and ``problem``.

        Args:
            spec: the spec of the extractor.
            wait: seconds to wait for its build; after that the record is returned in state ``building``.
            build: whether it may be created and named.
            keep: whether it must be in the store afterwards, if there is one. If false, failing to write the store is
                not an error.
            trace_in: runs the resolving, which may trace the model, in a thread; by default one of the builder threads.

        Raises:
            FxError: the spec names something that does not exist or is not served.
            NameTaken: another extractor has its name.
            Forbidden: it does not exist and ``build`` is false.
            NotReady: the store cannot be written.
            StoreFull: the store holds the maximum number of extractors.
        """
        description = await self._resolver.describe(spec, trace_in)
        record = self._records.get(description.id) or ExtractorRecord(description)
        name, owner, created = spec.name if build else None, record.id, False
        if build:
            created, owner = await self._save(record, name, keep or name is not None)
        else:
            await self._require(record)
        if record.deleted:  # meanwhile, or by another process
            return await self.get(spec, wait, build=build, keep=keep, trace_in=trace_in)
        known = self._records.get(record.id)
        if known is None:
            self._records.add(record)
        elif known is not record:  # another request was faster
            known.saved |= record.saved
            record, created = known, False
        if name is not None and owner == record.id:
            self._records.name(record, name)
        self._runtimes.ensure(record)
        if name is not None and owner != record.id:  # the name was given to another extractor meanwhile
            raise NameTaken(name, owner)
        if wait > 0:
            await self._runtimes.wait(record, wait)
        return record, created

    async def _save(self, record: ExtractorRecord, name: str | None, keep: bool) -> tuple[bool, str]:
        """Save ``record`` to the store and claim ``name``; see :meth:`_yielding`.

        Without ``keep``, the store is accessed at most once per :data:`CHECK_SECONDS`, and a store that is full or
        cannot be used is not an error.

        Returns:
            Whether it is new to all processes, and the id of the extractor that has the name, if a name was given.

        Raises:
            NameTaken: another extractor has its name.
            NotReady, StoreFull: see :meth:`get`.
        """
        new = self._records.get(record.id) is None
        if self._sharing is None:
            other = None if name is None else self._records.known(name)
            if name is not None and other is not None and other.id not in (record.id, *self._yielding(name)):
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
            created = await self._sharing.write(made.id, store.save, stored, keep, name, self._yielding(name))
            record.saved = True  # whether or not it gets its name
            if created:
                self._records.free_names(record)
            if name is not None:
                owner = await self._sharing.write(record.id, store.claim, name, record.id, self._yielding(name))
        except (NotReady, StoreFull):
            if keep:
                raise
            return new, record.id
        return created, owner

    def _yielding(self, name: str | None) -> set[str]:
        """Return the ids that give up ``name``, unless it is that id: of extractors whose build failed.

        Those of another process do not if the failure is temporary: they may work there.
        """
        return {
            record.id
            for record in self._records.values()
            if record.state == "failed" and record.id != name and not (record.adopted and _is_temporary(record.problem))
        }

    async def _require(self, record: ExtractorRecord) -> None:
        """Check that ``record`` already exists, here or in the store.

        Raises:
            Forbidden: it does not.
            NotReady: the store cannot be read, which may have it.
        """
        known = await self.known(record.id)
        if known is not None and known.id == record.id:  # and not another one whose name is this id
            return
        if self._sharing is not None and await self._sharing.find(record.id) == record.id:
            record.saved = True
            return
        spec = record.description.spec
        raise Forbidden(
            f"there is no extractor of these nodes of {spec.model} with these weights yet; create it by POST "
            "/v1/extractors, with a key with scope admin"
        )

    async def known(self, id_or_name: str, again: bool = False) -> ExtractorRecord | None:
        """Return the extractor with that id or name if it is known here.

        None if it was deleted, or if the name now belongs to another extractor.

        The store is read at most once per :data:`CHECK_SECONDS`, unless ``again`` is true. If it cannot be read, the
        in-memory state is used.
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
                    self._runtimes.forget(record)
            elif self._records.known(id_or_name) is record:
                self._records.free_name(id_or_name)
            return None
        except NotReady:
            return record

    async def look_up(self, id_or_name: str) -> ExtractorRecord:
        """Return the extractor with that id or name. If another process created it, start its build here.

        Raises:
            UnknownExtractor: it does not exist.
            NotReady: it is not known here and the store cannot be read.
        """
        return await self.known(id_or_name) or await self._adopted(id_or_name) or self._records.find(id_or_name)

    async def namesake(self, model: str) -> ExtractorRecord | None:
        """Return the extractor named like a model, if there is one that works here and the store can be read.

        Models are requested often, so a miss is cached: a name given by another process is noticed within
        :data:`NAMESAKE_SECONDS`.
        """
        try:
            return await self.known(model) or await self._adopted(model, NAMESAKE_SECONDS)
        except (NotReady, BadTensor):
            return None

    async def _adopted(self, id_or_name: str, max_miss_age: float = 0.0) -> ExtractorRecord | None:
        """Return the extractor of the store with that id or name. Start its build here if another process created it.

        An earlier miss is trusted for ``max_miss_age`` seconds.
        """
        if self._sharing is None:
            return None
        id = await self._sharing.find(id_or_name, max_miss_age)
        if id is None:
            return None
        record = await self._adopting.get(id, partial(self._made_known, self._sharing, id))
        if record is not None:
            record.saved = True  # it may have been created here while the store was unavailable
        if record is not None and id_or_name != id and self._records.get(id) is record:
            self._records.name(record, id_or_name)
        return record

    async def _made_known(self, sharing: Sharing, id: str) -> ExtractorRecord | None:
        """Return an extractor of the store; None if it was deleted meanwhile or its model is not served here.

        If another process created it, add it to the records and start its build.
        """
        if (known := self._records.get(id)) is not None:
            return known
        stored = await sharing.read(sharing.store.get, id)
        if stored is None or not self._resolver.serves(stored.spec.model):  # then it is not listed either
            return None
        try:
            description = await self._resolver.describe(stored.spec)
        except BadTensor:  # a limit of this process, which no retry changes
            raise
        except (FxError, Problem) as problem:
            raise NotReady(f"extractor {id}, which is in the store: {problem.detail}") from None
        if description.id != id:
            raise NotReady(
                f"extractor {id} was created where {stored.spec.model} has a different graph, perhaps by another "
                "version of torchvision; create it again here"
            )
        record = self._records.get(id) or ExtractorRecord(description)
        name = stored.spec.name
        named = name is not None and await sharing.find(name) == id
        known = self._records.get(id)
        if known is not None:  # a request for its nodes was faster
            return known
        if record.deleted:  # that request created it, and another one deleted it
            return None
        record.saved = record.adopted = True
        self._records.add(record)
        if name is not None and named:
            self._records.name(record, name)
        self._runtimes.ensure(record)
        return record

    async def preload(self, spec: ExtractorSpec) -> ExtractorRecord | None:
        """Return the extractor that ``spec`` describes; None if it was preloaded before and has been deleted since.

        A restarted process must not restore deleted extractors.

        Raises:
            FxError: see :meth:`get`.
            NotReady: the store cannot be read.
        """
        if self._sharing is not None:
            id = (await self._resolver.describe(spec)).id
            if await self._sharing.read(self._sharing.store.was_deleted, id):
                return None
        record, _ = await self.get(spec)
        if self._sharing is not None and record.saved:
            with suppress(NotReady):  # a store that cannot be written
                await self._sharing.write(record.id, self._sharing.store.mark_preloaded, record.id)
        return record

    async def elsewhere(self) -> list[tuple[Stored, str | None]]:
        """Return the extractors of the store that are not known here yet, each with one of its names.

        Those of models that are not served here are left out. Extractors that other processes deleted are forgotten. If
        one that has no name here was named by another process, the name becomes known.
        """
        shared = None if self._sharing is None else await self._sharing.all()
        if shared is None:
            return []
        ids = {stored.id for stored, _ in shared}
        for record in self._records.list():
            if record.saved and record.id not in ids:
                await self.known(record.id)
        for stored, name in shared:
            if name is None or self._records.known(name) is not None:
                continue
            known = self._records.get(stored.id)
            if known is not None and known.saved and known.name is None:
                self._records.name(known, name)  # its use checks it, so the store is not asked about each
        unknown = [(stored, name) for stored, name in shared if self._records.get(stored.id) is None]
        served = {model for model in {stored.spec.model for stored, _ in unknown} if self._resolver.serves(model)}
        return [(stored, name) for stored, name in unknown if stored.spec.model in served]

    async def delete(self, id_or_name: str) -> None:
        """Delete an extractor in all processes. Its requests in flight finish normally.

        Raises:
            UnknownExtractor: no extractor has that id or name.
            NotReady: the store cannot be read or written; nothing was deleted.
        """
        if self._sharing is None:
            self._runtimes.forget(self._records.find(id_or_name))
            return
        record = await self.known(id_or_name, again=True)
        id = None if record is None else record.id
        id = id or await self._sharing.read(self._sharing.store.find, id_or_name, True)
        id = id or self._records.find(id_or_name).id
        await self._sharing.write(id, self._sharing.store.delete, id)
        record = self._records.get(id)
        if record is not None:  # otherwise another request deleted it meanwhile, or only the store had it
            self._runtimes.forget(record)


def _is_temporary(problem: FxError | Problem | None) -> bool:
    unavailable = isinstance(problem, WeightsUnavailable | ExtractorFailed)  # the latter for reasons unknown
    return unavailable or getattr(problem, "retry_after", None) is not None
