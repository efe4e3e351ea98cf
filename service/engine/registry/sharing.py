"""One process's view of the store that it shares with others: look-ups off the event loop, and news of deletions."""

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
from service.engine.registry.objects import Damaged, StoreTrouble, told_of
from service.engine.registry.store import Store, Stored
from service.observability.metrics import Metrics
from service.schemas.v1 import ExtractorSpec

log = logging.getLogger("fxserve.store")

T = TypeVar("T")

POLL_SECONDS = 0.5
"""Between two looks at what was deleted, in a folder."""

REMOTE_POLL_SECONDS = 1.5
"""The same elsewhere, where each is a request that is paid for."""

_CHECKED_EVERY = 10
"""Looks, elsewhere than in a folder, of which one sees whether the store is still the one that it was."""

ANSWER_SECONDS = 5.0
"""After which the store is taken to be away."""

SWEEP_SECONDS = 60.0
"""Between two comparisons of all that is known with all that there is, for what no news came of."""

_NEWS_SECONDS = 10.0
"""For which something that was told is looked at again, should an answer have been on its way."""
_MOST_MISSES = 4096
_THREADS = 4


@dataclass(frozen=True)
class Known:
    """What the process has of the store in memory.

    Attributes:
        tokens: id → token of each extractor.
        unkept: extractors that were made while the store could not be written.
    """

    tokens: dict[str, str]
    unkept: list[ExtractorRecord]


class _Search:
    """A look-up that several requests may wait for."""

    def __init__(self, task: asyncio.Task[Stored | None]) -> None:
        self.began = time.monotonic()
        self.task = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have left


class Sharing:
    """Reads and writes a store in threads of its own, and watches it. For one event loop.

    Args:
        store: what is shared.
        metrics: where its state and its errors are counted.
        known: what there is in memory now.
        forget: called with the ids and tokens of extractors that were deleted by others.
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
        self._away: str | None = "the store of extractors has not been read yet"
        self._unwritable: str | None = None
        self._damaged: dict[str, str] = {}
        self._deleted: set[str] = set()
        self._putting: Counter[str] = Counter()
        self._seen: dict[str, float] = {}
        self._looks = 0
        self._swept = time.monotonic()
        self._missing: dict[str, float] = {}
        self._searches: dict[str, _Search] = {}

    async def start(self) -> None:
        """Start the threads, look at the store for the first time, and begin to watch it."""
        self._pool.start()
        self._watcher_pool.start()
        await self._look()
        self._watcher = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Watch no longer."""
        if self._watcher is not None:
            self._watcher.cancel()
        for pool in (self._pool, self._watcher_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def never_opened(self) -> str | None:
        """Why the store could not be read even once, where that is so."""
        return None if self._opened else self._away

    def trouble(self) -> str | None:
        """What is wrong with the store now. What is in memory serves nevertheless."""
        return self._away or self._unwritable or next(iter(self._damaged.values()), None)

    async def find(self, id_or_name: str, believe: float = 0.0) -> Stored | None:
        """The extractor of that id or name. Those who ask at the same time share an answer.

        Whoever asks after an extractor was made finds it: an answer that there is none is only taken from a search that
        began later than the question.

        Args:
            id_or_name: what to look for.
            believe: seconds that an earlier answer that there is none may be old nevertheless.

        Raises:
            NotReady: the store, or that extractor in it, cannot be read.
        """
        asked = time.monotonic()
        if asked - self._missing.get(id_or_name, -believe) < believe:
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
        """Keep ``record`` unless the store has it; what is there then, and whether it is new.

        Raises:
            NotReady: the store cannot be written.
        """
        self._putting[record.id] += 1
        try:
            stored, new = await self._call("write", self._store.put, *_about(record))
        finally:
            self._putting -= Counter((record.id,))  # which drops what is zero
        self._missing.pop(record.id, None)
        self._damaged.pop(record.id, None)
        return stored, new

    async def claim(self, name: str, stored: Stored, may_replace: Callable[[str], bool]) -> str:
        """Give ``name`` to ``stored``; the id that has it then, which another's is where that may not be replaced.

        Raises:
            NotReady: the store cannot be written.
        """
        owner = await self._call("write", self._store.claim, name, stored, may_replace)
        self._missing.pop(name, None)
        return owner

    async def delete(self, id: str) -> None:
        """Delete the extractor ``id`` for all.

        Raises:
            NotReady: the store cannot be written; nothing was deleted.
        """
        await self._call("write", self._store.delete, id)
        self._store.forget(id)
        self._deleted.add(id)

    async def all(self) -> list[tuple[Stored, str | None]]:
        """All extractors, each with a name that it has; none while the store is away."""
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
            if len(self._missing) >= _MOST_MISSES:
                self._missing.clear()
            self._missing[id_or_name] = time.monotonic()
        return found

    async def _call(self, operation: str, function: Callable[..., T], *args: object) -> T:
        if self._away is not None:
            raise NotReady(self._away, 1.0)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                result = await in_pool(self._pool, function, *args)
        except (StoreTrouble, TimeoutError) as error:
            self._errors.labels(operation).inc()
            text = str(error) or _silent(self._store.url)
            log.warning("%s", text)
            if isinstance(error, Damaged):
                self._damaged[str(args[0])] = text
            elif operation == "write":
                self._unwritable = text
            raise NotReady(text, 1.0) from None
        if operation == "write":
            self._unwritable = None
        return result

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS if self._store.local else REMOTE_POLL_SECONDS)
            try:
                await self._look()
            except Exception:
                log.exception("watching the store of extractors failed; it is tried again")

    async def _look(self) -> None:
        """Take note of what others deleted since the last time, and whether the store is there at all."""
        before = self._away
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                told = await in_pool(self._watcher_pool, self._told)
                await self._heed(told)
        except (StoreTrouble, TimeoutError) as error:
            self._errors.labels("watch").inc()
            self._away = str(error) or _silent(self._store.url)
            if before is None:
                log.error("%s; what is in memory is served", self._away)
        else:
            self._away = None
            if self._opened and before is not None:
                log.warning("the store of extractors %s is back", self._store.url)
            self._opened = True
        self._up.set(self._away is None)

    def _told(self) -> list[str]:
        if self._store.local or self._away is not None or self._looks % _CHECKED_EVERY == 0:
            self._store.check()
        self._looks += 1
        return self._store.deletions()

    def _ids(self) -> set[str]:
        self._store.check()  # what is there no more may be the store itself
        return self._store.ids()

    async def _heed(self, told: list[str]) -> None:
        now = time.monotonic()
        self._seen = {text: self._seen.get(text, now) for text in told}
        news = [told_of(text) for text, seen in self._seen.items() if now - seen < _NEWS_SECONDS]
        self._deleted = {what for kind, what in map(told_of, told) if kind == "extractor"}
        known = self._known()
        suspects = {what for kind, what in news if kind == "extractor" and what in known.tokens}
        for kind, what in news:
            if kind == "name":
                self._forget_name(what)
            else:
                self._store.forget(what)
        if now - self._swept > SWEEP_SECONDS or self._away is not None:
            there = await in_pool(self._watcher_pool, self._ids)
            suspects |= known.tokens.keys() - there
            self._swept = now
            self._damaged.clear()
            await in_pool(self._watcher_pool, self._prune)
        gone = await in_pool(self._watcher_pool, self._gone, {id: known.tokens[id] for id in suspects})
        # What is being put may be there by now. It gets its new token with the answer, or is looked at again.
        gone = {id: token for id, token in gone.items() if id not in self._putting}
        if gone:
            self._forget(gone)
        try:
            for record in known.unkept:
                stored, _ = await in_pool(self._watcher_pool, self._store.put, *_about(record))
                record.token = stored.token
                self._unwritable = None
        except StoreTrouble as trouble:
            self._unwritable = str(trouble)

    def _gone(self, tokens: dict[str, str]) -> dict[str, str]:
        """Those of ``tokens`` that are there no more, or were made anew."""
        gone = {}
        for id, token in tokens.items():
            try:
                stored = self._store.get(id)
            except Damaged:
                continue
            if stored is None or stored.token != token:
                gone[id] = token
        return gone

    def _prune(self) -> None:
        try:
            self._store.prune()
        except StoreTrouble as trouble:
            log.warning("%s", trouble)


def _about(record: ExtractorRecord) -> tuple[str, ExtractorSpec, str, dict[str, str], str]:
    return record.id, record.spec, record.weights, record.return_nodes, record.fingerprint


def _silent(url: str) -> str:
    return f"the store of extractors {url} did not answer within {ANSWER_SECONDS:.0f} s"
