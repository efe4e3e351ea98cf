"""A store of extractors, each a small object.

Under ``FXSERVE_EXTRACTORS``, a folder or any URL that fsspec knows:

- ``store.json`` marks it as a store. Without it the store counts as unavailable, not as empty.
- ``specs/ID.json`` is an extractor; it exists as long as this object does.
- ``names/NAME.json`` holds the id that has the name. If that extractor does not exist, the name is free.
- ``named/ID.NAME.json`` indexes the names of an id, for deletion and listings; ``names`` is authoritative.
- ``marks/preloaded-ID.json``: the extractor was once preloaded. If it does not exist, it has been deleted since.
- ``marks/free-NAME-TOKEN.json``: a process is removing that name object.

Objects are created exclusively and atomically, and never change; see :mod:`service.engine.extractors.objects`.
"""

from __future__ import annotations

import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import BaseModel

from fxcore.errors import summarize
from service.byte_cache import ByteCache
from service.engine.extractors.objects import VERSION, DamagedObject, Objects, StoreError, UnusableObject, Unwritable
from service.problems import NameTaken, StoreFull
from service.schemas.specs import STORED, ExtractorSpec

NAMES_PER_EXTRACTOR = 4
"""Maximum names in the store, as a multiple of the maximum number of extractors."""

_FOLDERS = "specs", "names", "named", "marks"
_ATTEMPTS, _DEAD_SECONDS = 40, 60.0
_COUNT_SECONDS, _RECOUNT_SECONDS = 60.0, 2.0
_LISTED_AT_ONCE = 500
_CACHED_BYTES = 64 * 1024**2
_ID = re.compile(r"[0-9a-f]{12}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_DAMAGED = {"id": "", "token": "damaged"}
"""The content of a damaged name object: no extractor has that id, so the name can be claimed."""


class Stored(BaseModel, frozen=True):
    """An extractor in the store.

    Attributes:
        id: see :func:`~service.engine.extractors.resolving.extractor_id`.
        spec: its spec, with the full name of its weights. Its ``name`` is the original one, which may belong to another
            extractor now.
        return_nodes: key → resolved node.
        fingerprint: fingerprint of the model's graph in the process that created it.
    """

    id: str
    spec: ExtractorSpec
    return_nodes: dict[str, str]
    fingerprint: str


class Store:
    """A store at a URL.

    Methods block, so do not call them on the event loop. Thread-safe. Methods raise :class:`StoreError`.

    Args:
        url: a folder, or any URL that fsspec knows.
        limit: approximate maximum number of extractors: concurrent saves may exceed it.

    Raises:
        ValueError: there is no driver for the URL, it is not installed, or it cannot create objects exclusively.
    """

    def __init__(self, url: str, limit: int = sys.maxsize) -> None:
        self.url = url
        self._objects = Objects(url)
        self._mark: dict[str, Any] | None = None
        self._limits = {"extractors": limit, "names": NAMES_PER_EXTRACTOR * limit}
        self._counts = dict.fromkeys(self._limits, 0)
        self._counted = -_COUNT_SECONDS
        self._counting = threading.Lock()
        self._cached: ByteCache[str, Stored] = ByteCache(_CACHED_BYTES, lambda stored: len(repr(stored)))

    def check(self, write: bool = False) -> None:
        """Check that the store is the one that was opened. The first time, open it, creating it if it does not exist.

        A read-only store can be opened. With ``write``, also test writing.
        """
        mark = self._objects.read("store.json")
        if self._mark is None:
            if mark is None:
                self._objects.prepare(*_FOLDERS)
                self._objects.create("store.json", {"store": secrets.token_hex(8)})
                mark = self._objects.read("store.json")
            elif mark["version"] < VERSION:
                raise StoreError(
                    f"the store of extractors {self.url} was written by an older fxserve (format {mark['version']}, "
                    f"this one reads {VERSION}); use a new store"
                )
            self._mark = mark
        if mark is None or mark != self._mark:
            raise StoreError(
                f"the store of extractors {self.url} cannot be read: "
                + ("its store.json is missing" if mark is None else "another store has taken its place")
            )
        if write:
            self._objects.prepare(*_FOLDERS)
            probe = f"parts/probe-{secrets.token_hex(8)}.json"
            self._objects.create(probe, {})
            self._objects.remove(probe)

    def get(self, id: str) -> Stored | None:
        """Return the extractor ``id``; None if it does not exist."""
        content = self._objects.read(f"specs/{id}.json")
        return None if content is None else _stored(id, content)

    def find(self, id_or_name: str, damaged: bool = False) -> str | None:
        """Return the id of the extractor with that id or name, or None.

        With ``damaged``, its object may be damaged.
        """
        has = partial(self._has, damaged=True) if damaged else self.get
        if _ID.fullmatch(id_or_name) and has(id_or_name):
            return id_or_name
        entry = self._entry(id_or_name) if _NAME.fullmatch(id_or_name) else None
        if entry is not None and has(entry["id"]):
            return str(entry["id"])
        self.check()  # otherwise a store that is gone looks empty
        return None

    def save(self, stored: Stored, keep: bool = True, name: str | None = None, yielding: Collection[str] = ()) -> bool:
        """Create an extractor unless it exists, and return whether it was created. A damaged object is replaced.

        Nothing is written if it exists.

        Args:
            stored: the extractor.
            keep: whether a client requested that it be kept. Extractors created by one-step requests are saved only
                until the store is half full, so that they cannot fill it.
            name: the name that it will claim: nothing is created if another extractor has it.
            yielding: the ids of extractors that give up their names.

        Raises:
            NameTaken: another extractor has the name.
            StoreFull: the store holds the maximum number of extractors or names.
        """
        exists = self._has(stored.id)
        if name is not None or not exists:
            self._count()
        if name is not None and (owner := self.find(name)) != stored.id:
            if owner is None:
                self._require_room("names")
            elif owner not in yielding:
                raise NameTaken(name, owner)
        if exists:
            return False
        self._require_room("extractors", 1 if keep else 2)
        path = f"specs/{stored.id}.json"
        # Without defaults: versions that lack a field read the specs that do not use it.
        content = stored.model_dump(mode="json", exclude_defaults=True)
        created = self._objects.create(path, content)
        if not created and not self._has(stored.id):  # it is damaged
            self._objects.remove(path)
            created = self._objects.create(path, content)
        self._counts["extractors"] += created
        return created

    def claim(self, name: str, id: str, yielding: Collection[str] = ()) -> str:
        """Give ``name`` to ``id`` unless another extractor has it and is not ``yielding``.

        Return the id that has the name afterwards.
        """
        listed, owner = f"named/{id}.{name}.json", ""
        self._counts["names"] += self._objects.create(listed, {})
        try:
            owner = self._take(name, id, yielding)
            return owner
        finally:
            if owner != id:
                with suppress(StoreError):  # it may have got the name despite an error
                    entry = self._entry(name)
                    if entry is None or entry["id"] != id:
                        self._objects.remove(listed)

    def _take(self, name: str, id: str, yielding: Collection[str]) -> str:
        for _ in range(_ATTEMPTS):
            if self._objects.create(f"names/{name}.json", {"id": id, "token": secrets.token_hex(8)}):
                if self.get(id) is None:  # deleted meanwhile, perhaps before its name could be removed
                    self._free(name, id)
                return id
            entry = self._entry(name)
            if entry is None:
                continue
            owner = str(entry["id"])
            if owner == id or (owner not in yielding and self.get(owner) is not None):
                return owner
            self._free(name, owner)
        raise StoreError(f"the name {name} in {self.url} is being freed by another process")

    def delete(self, id: str) -> None:
        """Remove the extractor ``id`` and its names.

        The extractor is removed before its names, so that a name given meanwhile is either found here or freed by its
        claim.
        """
        if self._has(id):
            self._counts["extractors"] -= 1
        else:
            self.check()
        self._objects.remove(f"specs/{id}.json")
        for owner, name in self._named():
            if owner == id:
                with suppress(UnusableObject):
                    self._free(name, id)

    def mark_preloaded(self, id: str) -> None:
        """Record that the extractor ``id``, which exists, was preloaded."""
        self._objects.create(f"marks/preloaded-{id}.json", {})

    def was_deleted(self, id: str) -> bool:
        """Return whether the extractor ``id`` was once preloaded and no longer exists."""
        return self._objects.read(f"marks/preloaded-{id}.json") is not None and self.find(id) is None

    def all(self) -> list[tuple[Stored, str | None]]:
        """Return all readable extractors, each with one of its names."""
        named = sorted(self._named())
        times = Counter(name for _, name in named)
        # A process writes the index before it gets a name, and may die in between.
        names = {id: name for id, name in named if times[name] == 1 or (self._entry(name) or _DAMAGED)["id"] == id}
        ids = sorted(file.removesuffix(".json") for file in self._objects.names_in("specs"))
        found = {id: stored for id in ids if (stored := self._cached.get(id)) is not None}
        new = [f"{id}.json" for id in ids if id not in found]
        for start in range(0, len(new), _LISTED_AT_ONCE):
            for file, content in self._objects.read_all("specs", new[start : start + _LISTED_AT_ONCE]).items():
                with suppress(UnusableObject):
                    id = file.removesuffix(".json")
                    found[id] = _stored(id, content)
                    self._cached.put(id, found[id])  # an id always means the same extractor
        return [(found[id], names.get(id)) for id in ids if id in found]

    def _named(self) -> list[tuple[str, str]]:
        """Return all pairs of id and name."""
        pairs = (file.removesuffix(".json").partition(".") for file in self._objects.names_in("named"))
        return [(id, name) for id, _, name in pairs]

    def _has(self, id: str, damaged: bool = False) -> bool:
        """Return whether the extractor ``id`` exists; ``damaged`` if it is damaged."""
        try:
            return self.get(id) is not None
        except DamagedObject:
            return damaged

    def _count(self) -> None:
        """Count the extractors and names if that is due: once a minute, and sooner if the store seems full.

        Listing thousands of objects takes seconds, so only one thread counts. The others use the last count.
        """
        full = any(self._counts[kind] >= limit for kind, limit in self._limits.items())
        age = time.monotonic() - self._counted
        if age >= (_RECOUNT_SECONDS if full else _COUNT_SECONDS) and self._counting.acquire(blocking=False):
            try:
                extractors, names = (len(self._objects.names_in(folder)) for folder in ("specs", "named"))
                self._counts = {"extractors": extractors, "names": names}
                self._counted = time.monotonic()
            finally:
                self._counting.release()

    def _require_room(self, kind: str, share: int = 1) -> None:
        """Check that fewer extractors or names (``kind``) are there than the limit divided by ``share``."""
        limit = self._limits[kind] // share
        if self._counts[kind] >= limit:
            raise StoreFull(kind, self._counts[kind], limit)

    def _entry(self, name: str) -> dict[str, Any] | None:
        """Return the object of ``name``, an ``id`` and a ``token``; None if there is none.

        It is :data:`_DAMAGED` if it is damaged.
        """
        try:
            entry = self._objects.read(f"names/{name}.json")
        except DamagedObject:
            return _DAMAGED
        whole = entry is None or all(isinstance(entry.get(key), str) for key in _DAMAGED)
        return entry if whole else _DAMAGED

    def _free(self, name: str, id: str) -> None:
        """Take ``name`` from ``id``, unless another extractor has it.

        Only one process at a time removes a name object: a second, slower one would remove an object created since.
        """
        self._objects.remove(f"named/{id}.{name}.json")
        entry = self._entry(name)
        if entry is None or entry["id"] != id:
            return
        mark = f"marks/free-{name}-{entry['token']}.json"
        try:
            mine = self._objects.create(mark, {})
        except Unwritable as error:
            if not isinstance(error.__cause__, OSError):
                raise
            mine = True  # on a full disk nobody creates a name either
        if mine:
            if self._entry(name) == entry:
                self._objects.remove(f"names/{name}.json")
            self._objects.remove(mark)
            return
        other = self._objects.read(mark)
        if other is not None and abs(time.time() - other["made"]) > _DEAD_SECONDS:
            self._objects.remove(mark)
        time.sleep(0.05)


def _stored(id: str, content: dict[str, Any]) -> Stored:
    """Return the extractor ``id``, whose object holds ``content``.

    Raises:
        DamagedObject: it is damaged.
    """
    try:
        return Stored.model_validate(content, context=STORED)
    except ValueError as error:
        raise DamagedObject(f"specs/{id}.json cannot be used: {summarize(error)}") from error
