"""One process's access to the store that it shares with others: reads and writes off the event loop, and polling."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from service.engine.device.threads import Pool, in_pool
from service.engine.errors import NotReady
from service.engine.record import ExtractorRecord
from service.engine.registry.objects import DamagedObject, StoreError, kind_and_subject
from service.engine.registry.store import Store, Stored
from service.observability.metrics import Metrics
from service.schemas.v1 import ExtractorSpec

log = logging.getLogger("fxserve.store")

T = TypeVar("T")

POLL_SECONDS = 0.5
"""Seconds between two polls of a folder."""

REMOTE_POLL_SECONDS = 1.5
"""Seconds between two polls of a bucket, where each is a request that costs money."""

_POLLS_PER_CHECK = 10
"""Polls of a bucket of which one also checks that it still holds the same store."""

TIMEOUT_SECONDS = 5.0
"""After which the store is taken to be unavailable."""

SWEEP_SECONDS = 60.0
"""Between two comparisons of all extractors in memory with all in the store, which find deletions without a notice."""

_RECENT_SECONDS = 10.0
"""How long a notice is acted on at every poll: a read that began before it may end after it."""
_MAX_MISSES = 4096
_THREADS = 4


@dataclass(frozen=True)
class Known:
    """The extractors in memory.

    Attributes:
        tokens: id → token of those that are in the store.
        unsaved: those that were made while the store could not be written.
    """

    tokens: dict[str, str]
    unsaved: list[ExtractorRecord]


class _Search:
    """A look-up that several requests wait for."""

    def __init__(self, task: asyncio.Task[Stored | None]) -> None:
        self.began = time.monotonic()
        self.task = task
        # All who wait may have left: asyncio logs an exception that nobody reads.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


class Sharing:
    """Reads and writes a store in its own threads, and polls it. For one event loop.

    Args:
        store: what is shared.
        metrics: where its state and its errors are counted.
        known: gives what is in memory now.
        forget: called with the ids and tokens of extractors that other processes deleted.
        forget_name: called with a name that another extractor has now.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        known: Callable[[], Known],
        forget: Callable[[Mapping[str, str]], None],
        forget_name: Callable[[str], None],
    ) -> None:
        self._store = store
        self._up = metrics.store_up
        self._errors = metrics.store_errors
        self._known = known
        self._forget = forget
        self._forget_name = forget_name
        self._pool = Pool(_THREADS, "fxserve-store")
        self._watcher_pool = Pool(1, "fxserve-store-watch")
        self._watcher: asyncio.Task[None] | None = None
        self._opened = False
        self._unavailable: str | None = "the store of extractors has not been read yet"
        self._unwritable: str | None = None
        self._damaged: dict[str, str] = {}
        self._deleted: set[str] = set()
        self._putting: Counter[str] = Counter()
        self._seen: dict[str, float] = {}
        self._polls = 0
        self._swept = time.monotonic()
        self._missing: dict[str, float] = {}
        self._searches: dict[str, _Search] = {}

    async def start(self) -> None:
        """Start the threads, poll the store once, and go on polling in the background."""
        self._pool.start()
        self._watcher_pool.start()
        await self._poll()
        self._watcher = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop polling."""
        if self._watcher is not None:
            self._watcher.cancel()
        for pool in (self._pool, self._watcher_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def never_opened(self) -> str | None:
        """Why the store has not been read even once; None if it has."""
        return None if self._opened else self._unavailable

    def error(self) -> str | None:
        """What is wrong with the store now. Extractors in memory are served all the same."""
        return self._unavailable or self._unwritable or next(iter(self._damaged.values()), None)

    async def find(self, id_or_name: str, miss_seconds: float = 0.0) -> Stored | None:
        """The extractor of that id or name. Concurrent callers share one search.

        An extractor that exists when this is called is found: a search that began earlier and found none is repeated.

        Args:
            id_or_name: what to look for.
            miss_seconds: how old a search that found none may be to be relied on.

        Raises:
            NotReady: the store, or that extractor in it, cannot be read.
        """
        asked = time.monotonic()
        if asked - self._missing.get(id_or_name, -miss_seconds) < miss_seconds:
            return None
        while True:
            search = self._searches.get(id_or_name)
            if search is None:
                search = self._searches[id_or_name] = _Search(asyncio.create_task(self._find(id_or_name)))
            found = await asyncio.shield(search.task)
            if found is not None or search.began >= asked:
                return found

    async def get(self, id: str) -> Stored | None:
        """The extractor ``id``.

        Raises:
            NotReady: see :meth:`find`.
        """
        return await self._call("read", self._store.get, id)

    async def owner(self, name: str) -> Stored | None:
        """The extractor that has ``name``.

        Raises:
            NotReady: see :meth:`find`.
        """
        return await self._call("read", self._store.owner, name)

    async def put(self, record: ExtractorRecord) -> tuple[Stored, bool]:
        """Save ``record`` unless the store has it; what the store has then, and whether that is new.

        Raises:
            NotReady: the store cannot be written.
        """
        self._putting[record.id] += 1
        try:
            stored, new = await self._call("write", self._store.put, *_fields(record))
        finally:
            self._putting -= Counter((record.id,))  # which drops what is zero
        self._missing.pop(record.id, None)
        self._damaged.pop(record.id, None)
        return stored, new

    async def claim(self, name: str, stored: Stored, may_replace: Callable[[str], bool]) -> str:
        """Give ``name`` to ``stored``, unless another has it that may not be replaced; the id that has it then.

        Raises:
            NotReady: the store cannot be written.
        """
        owner = await self._call("write", self._store.claim, name, stored, may_replace)
        self._missing.pop(name, None)
        return owner

    async def delete(self, id: str) -> None:
        """Delete the extractor ``id`` in all processes.

        Raises:
            NotReady: the store cannot be written; nothing was deleted.
        """
        await self._call("write", self._store.delete, id)
        self._store.drop_cached(id)
        self._deleted.add(id)

    async def all(self) -> list[tuple[Stored, str | None]]:
        """All extractors, each with one of its names; none while the store is unavailable."""
        try:
            return await self._call("read", self._store.all)
        except NotReady:
            return []

    def was_deleted(self, id: str) -> bool:
        """Whether ``id`` was deleted in the last day, and may have been made again since."""
        return id in self._deleted

    async def _find(self, id_or_name: str) -> Stored | None:
        try:
            found = await self._call("read", self._store.find, id_or_name)
        finally:
            del self._searches[id_or_name]
        if found is None:
            if len(self._missing) >= _MAX_MISSES:
                self._missing.clear()
            self._missing[id_or_name] = time.monotonic()
        return found

    async def _call(self, operation: str, function: Callable[..., T], *args: object) -> T:
        if self._unavailable is not None:
            raise NotReady(self._unavailable, 1.0)
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                result = await in_pool(self._pool, function, *args)
        except (StoreError, TimeoutError) as error:
            self._errors.labels(operation).inc()
            text = str(error) or self._timed_out()
            log.warning("%s", text)
            if isinstance(error, DamagedObject):
                self._damaged[str(args[0])] = text
            elif operation == "write":
                self._unwritable = text
            raise NotReady(text, 1.0) from None
        if operation == "write":
            self._unwritable = None
        return result

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS if self._store.objects.local else REMOTE_POLL_SECONDS)
            try:
                await self._poll()
            except Exception:
                log.exception("polling the store of extractors failed; it is tried again")

    async def _poll(self) -> None:
        """Find out whether the store is available; follow deletions by other processes, and save what is unsaved."""
        before = self._unavailable
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._follow(await in_pool(self._watcher_pool, self._read_notices))
                await self._save_unsaved()
        except (StoreError, TimeoutError) as error:
            self._errors.labels("watch").inc()
            self._unavailable = str(error) or self._timed_out()
            if before is None:
                log.error("%s; what is in memory is served", self._unavailable)
        else:
            self._unavailable = None
            if self._opened and before is not None:
                log.warning("the store of extractors %s is back", self._store.objects.url)
            self._opened = True
        self._up.set(self._unavailable is None)

    def _read_notices(self) -> list[str]:
        if self._store.objects.local or self._unavailable is not None or self._polls % _POLLS_PER_CHECK == 0:
            self._store.check()
        self._polls += 1
        return self._store.notices()

    async def _follow(self, notices: list[str]) -> None:
        """Forget the extractors and names that ``notices``, or a sweep now and then, show to be gone."""
        now = time.monotonic()
        self._seen = {notice: self._seen.get(notice, now) for notice in notices}
        self._deleted = {subject for kind, subject in map(kind_and_subject, notices) if kind == "extractor"}
        known = self._known()
        suspects = set()
        for notice, seen in self._seen.items():
            if now - seen >= _RECENT_SECONDS:
                continue
            kind, subject = kind_and_subject(notice)
            if kind == "name":
                self._forget_name(subject)
            else:
                self._store.drop_cached(subject)
                suspects |= {subject} & known.tokens.keys()
        if now - self._swept > SWEEP_SECONDS or self._unavailable is not None:
            suspects |= known.tokens.keys() - await in_pool(self._watcher_pool, self._ids)
            self._swept = now
            self._damaged.clear()
            await in_pool(self._watcher_pool, self._prune)
        gone = await in_pool(self._watcher_pool, self._gone, {id: known.tokens[id] for id in suspects})
        # One that is being saved may exist by now. Its put gives it the new token, or a later poll finds it gone.
        gone = {id: token for id, token in gone.items() if id not in self._putting}
        if gone:
            self._forget(gone)

    def _ids(self) -> set[str]:
        self._store.check()  # else a store that is gone looks like one whose extractors were all deleted
        return self._store.ids()

    def _gone(self, tokens: dict[str, str]) -> dict[str, str]:
        """Those of ``tokens`` whose extractor was deleted, or deleted and made again."""
        gone = {}
        for id, token in tokens.items():
            try:
                stored = self._store.get(id)
            except DamagedObject:
                continue
            if stored is None or stored.token != token:
                gone[id] = token
        return gone

    def _prune(self) -> None:
        try:
            self._store.prune()
        except StoreError as error:
            log.warning("%s", error)

    async def _save_unsaved(self) -> None:
        """Save what was made while the store could not be written, except what is deleted by then."""
        try:
            for record in self._known().unsaved:
                if not self._in_memory(record.id):
                    continue
                stored, new = await in_pool(self._watcher_pool, self._store.put, *_fields(record))
                self._unwritable = None
                if self._in_memory(record.id):
                    record.token = stored.token
                elif new:  # deleted while it was being saved
                    await in_pool(self._watcher_pool, self._store.delete, record.id)
        except StoreError as error:
            self._unwritable = str(error)

    def _in_memory(self, id: str) -> bool:
        known = self._known()
        return id in known.tokens or id in self._putting or any(record.id == id for record in known.unsaved)

    def _timed_out(self) -> str:
        return f"the store of extractors {self._store.objects.url} did not answer within {TIMEOUT_SECONDS:.0f} s"


def _fields(record: ExtractorRecord) -> tuple[str, ExtractorSpec, str, dict[str, str], str]:
    return record.id, record.spec, record.weights, record.return_nodes, record.fingerprint
