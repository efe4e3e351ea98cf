"""What one process does about the shared store in the background: it polls, follows deletions, and saves late."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from service.engine.device.threads import Pool, in_pool
from service.engine.extractors.objects import DamagedObject, StoreError, kind_and_subject
from service.engine.extractors.sharing import Sharing
from service.engine.extractors.store import Store
from service.engine.extractors.store_health import StoreHealth
from service.engine.record import ExtractorRecord
from service.problems import NotReady, StoreFull

log = logging.getLogger("fxserve.store")

POLL_SECONDS = 0.5
"""Seconds between two polls of a folder."""

REMOTE_POLL_SECONDS = 1.5
"""Seconds between two polls of a bucket, where each is a request that costs money."""

_POLLS_PER_CHECK = 10
"""Polls of a bucket of which one also checks that it still holds the same store."""

SWEEP_SECONDS = 60.0
"""Between two comparisons of all extractors in memory with all in the store, which find deletions without a notice."""

_RECENT_SECONDS = 10.0
"""How long a notice is acted on at every poll: a read that began before it may end after it."""


@dataclass(frozen=True)
class Known:
    """The extractors in memory.

    Attributes:
        tokens: id → token of those that are in the store.
        unsaved: those that were made while the store could not be written.
    """

    tokens: dict[str, str]
    unsaved: list[ExtractorRecord]


class Watcher:
    """Polls a store, so that this process follows what others delete, and knows whether it is available. For one event
    loop.

    What takes long runs beside the polls: the sweeps, and the late saving of what was made while the store could not be
    written.

    Args:
        store: what is polled.
        health: where it is noted whether the store is available.
        sharing: saves extractors.
        known: gives what is in memory now.
        forget: called with the ids and tokens of extractors that other processes deleted.
        forget_name: called with a name that another extractor has now.
    """

    def __init__(
        self,
        store: Store,
        health: StoreHealth,
        sharing: Sharing,
        known: Callable[[], Known],
        forget: Callable[[Mapping[str, str | None]], None],
        forget_name: Callable[[str], None],
    ) -> None:
        self._store = store
        self._health = health
        self._sharing = sharing
        self._known = known
        self._forget = forget
        self._forget_name = forget_name
        self._pool = Pool(1, "fxserve-store-poll")
        self._sweep_pool = Pool(1, "fxserve-store-sweep")
        self._polling: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._deleted: set[str] = set()
        self._seen: dict[str, float] = {}
        self._polls = 0
        self._swept = time.monotonic()

    async def start(self) -> None:
        """Poll once, and go on polling in the background."""
        self._pool.start()
        self._sweep_pool.start()
        await self._poll()
        self._polling = asyncio.create_task(self._keep_polling())

    def close(self) -> None:
        """Stop polling, sweeping and saving."""
        for task in (self._polling, self._sweeping, self._saving):
            if task is not None:
                task.cancel()
        for pool in (self._pool, self._sweep_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def was_deleted(self, id: str) -> bool:
        """Return whether ``id`` was deleted in the last day, and may have been made again since."""
        return id in self._deleted

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS if self._store.objects.local else REMOTE_POLL_SECONDS)
            try:
                await self._poll()
            except Exception:
                log.exception("polling the store of extractors failed; it is tried again")

    async def _poll(self) -> None:
        """Find out whether the store is available, and follow what other processes deleted."""
        away = self._health.unavailable is not None
        try:
            async with self._health.in_time():
                await self._follow(await in_pool(self._pool, self._read_notices))
        except (StoreError, TimeoutError) as error:
            self._health.lost(self._health.failed("watch", error))
            return
        self._health.found()
        if away or time.monotonic() - self._swept > SWEEP_SECONDS:
            self._swept = time.monotonic()
            self._sweeping = _unless_running(self._sweeping, self._sweep)
        if self._known().unsaved:
            self._saving = _unless_running(self._saving, self._save_unsaved)

    def _read_notices(self) -> list[str]:
        if self._store.objects.local or self._health.unavailable is not None or self._polls % _POLLS_PER_CHECK == 0:
            self._store.check()
        self._polls += 1
        return self._store.notices()

    async def _follow(self, notices: list[str]) -> None:
        """Forget the extractors and names that recent ``notices`` show to be gone."""
        now = time.monotonic()
        unseen = {kind_and_subject(notice) for notice in set(notices) - self._seen.keys()}
        self._seen = {notice: self._seen.get(notice, now) for notice in notices}
        self._deleted = {subject for kind, subject in map(kind_and_subject, notices) if kind == "extractor"}
        suspects = set()
        for notice, seen in self._seen.items():
            if now - seen >= _RECENT_SECONDS:
                continue
            kind, subject = kind_and_subject(notice)
            if kind == "name":
                self._forget_name(subject)
            else:
                self._store.drop_cached(subject)
                suspects.add(subject)
        known = self._known()
        tokens: dict[str, str | None] = {id: known.tokens[id] for id in suspects & known.tokens.keys()}
        # What this process could not save may have been in the store, and deleted there.
        tokens |= {record.id: None for record in known.unsaved if ("extractor", record.id) in unseen}
        await self._forget_gone(tokens, self._pool)

    async def _sweep(self) -> None:
        """Forget what the store no longer has, noticed or not; find out whether it can be written, and tidy it."""
        self._health.damaged.clear()
        try:
            ids = await in_pool(self._sweep_pool, self._ids)
            self._sharing.stored = len(ids)
            self._sharing.named = len(await in_pool(self._sweep_pool, self._store.names))
            tokens = self._known().tokens
            await self._forget_gone({id: tokens[id] for id in tokens.keys() - ids}, self._sweep_pool)
        except StoreError as error:
            log.warning("%s", self._health.failed("sweep", error))
            return
        try:
            await in_pool(self._sweep_pool, self._store.probe)
            self._health.unwritable = None
            await in_pool(self._sweep_pool, self._store.prune)
        except StoreError as error:
            self._health.unwritable = self._health.failed("sweep", error)
            log.warning("%s", self._health.unwritable)

    async def _forget_gone(self, tokens: Mapping[str, str | None], pool: Pool) -> None:
        """Forget those of ``tokens``, extractors in memory, that the store no longer has."""
        gone = await in_pool(pool, self._gone, tokens)
        # One that is being saved may exist by now. Its save gives it the new token, or a later poll finds it gone.
        gone = {id: token for id, token in gone.items() if not self._sharing.is_saving(id)}
        if gone:
            self._forget(gone)

    def _ids(self) -> set[str]:
        self._store.check()  # else a store that is gone looks like one whose extractors were all deleted
        return self._store.ids()

    def _gone(self, tokens: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return those of ``tokens`` whose extractor was deleted, or deleted and made again; one without a token is not
        gone if the store has it."""
        gone = {}
        for id, token in tokens.items():
            try:
                stored = self._store.get(id)
            except DamagedObject:
                continue
            if stored is None or token not in (None, stored.token):
                gone[id] = token
        return gone

    async def _save_unsaved(self) -> None:
        """Save what was made while the store could not be written, except what is deleted by then."""
        for record in self._known().unsaved:
            if record.deleted or self._sharing.is_deleting(record.id):
                continue
            try:
                stored, _ = await self._sharing.put(record)
            except (NotReady, StoreFull):
                return  # a later poll goes on
            record.token = stored.token


def _unless_running(
    task: asyncio.Task[None] | None, begin: Callable[[], Coroutine[Any, Any, None]]
) -> asyncio.Task[None]:
    """``task`` while it runs, else a new one of ``begin``."""
    return task if task is not None and not task.done() else asyncio.create_task(begin())
