"""The store that processes share: specs, names and deletions of extractors, each a small object.

Under ``FXSERVE_EXTRACTORS``, a folder or any URL that fsspec knows:

- ``store.json`` marks it as a store. Without it the store is taken to be unavailable, not empty.
- ``specs/ID.json`` is an extractor, which exists as long as this object does. Its token is a new one each time that the
  extractor is made: one that was deleted and made again is not the same.
- ``names/NAME/N.json`` gives a name to an id and a token. The highest N is the owner, and the name is free where that
  extractor, with that token, no longer exists. Giving it to another creates N + 1.
- ``deleted/KIND-SUBJECT.TIME.TOKEN.json`` is a notice to the other processes that an extractor was deleted, or that a
  name has another owner. It is kept for a day.

Objects are created exclusively and atomically, and never change; see :mod:`service.engine.extractors.objects`.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fxcore.errors import summarize
from service.byte_cache import ByteCache
from service.engine.extractors.objects import (
    DamagedObject,
    NewerVersion,
    Objects,
    StoreError,
    kind_and_subject,
    unique_name,
    written_at,
)
from service.schemas.v1 import ExtractorSpec

NOTICE_SECONDS = 24 * 3600.0
"""How long the notice of a deletion is kept."""

MAX_NOTICES = 4096
"""Maximum notices, of which each process reads the names at every poll. The oldest go first, but none of the last
minutes, which others may not have seen."""

_UNSEEN_SECONDS = 300.0
_PRUNED_NAMES = 100
_FOLDERS = "specs", "names", "deleted", "parts"

_PAGE = 50
"""Extractors, or names, that one step of a listing reads."""

_CACHED_BYTES = 64 * 1024**2
_OWNER_BYTES = 512
_ID = re.compile(r"[0-9a-f]{12}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Stored:
    """An extractor in the store.

    Attributes:
        id: as :func:`~service.engine.extractors.resolving.extractor_id` has it.
        token: a new one each time that it is made.
        spec: with the full name of its weights. Its ``name`` is the one it was made with, which may be another's now.
        return_nodes: key → node, resolved.
        fingerprint: of the model's graph where it was made.
    """

    id: str
    token: str
    spec: ExtractorSpec
    return_nodes: dict[str, str]
    fingerprint: str


class Store:
    """A store at a URL. Blocks: not for the event loop. For any thread.

    Attributes:
        objects: the objects that it consists of; they know the URL and whether it is a folder.

    Raises:
        ValueError: there is no driver for the URL, or it is not installed.
    """

    def __init__(self, url: str) -> None:
        self.objects = Objects(url)
        self._mark: dict[str, Any] | None = None
        self._cached: ByteCache[str, Stored] = ByteCache(_CACHED_BYTES, lambda stored: len(repr(stored)))
        self._owners: ByteCache[str, tuple[str, str]] = ByteCache(_CACHED_BYTES // 4, lambda _: _OWNER_BYTES)

    def open(self) -> None:
        """Read which store it is, and create it if there is none. One that cannot be written can be opened.

        Raises:
            StoreError: it cannot be read or created, or a newer version made it.
        """
        with self.objects.store_errors("opened"):
            self._mark = self.objects.read("store.json")
            if self._mark is None:
                self.objects.make_folders(*_FOLDERS)
                self.objects.create("store.json", {"store": secrets.token_hex(8)})
                self._mark = self.objects.read("store.json")

    def probe(self) -> None:
        """Write something, and remove it.

        Raises:
            StoreError: the store cannot be written, or has gone.
        """
        self.check()  # else the folders would be made again where a store was taken away
        with self.objects.store_errors("written"):
            self.objects.make_folders(*_FOLDERS)
            probe = f"parts/probe-{secrets.token_hex(8)}.json"
            self.objects.create(probe, {})
            self.objects.remove(probe)

    def check(self) -> None:
        """Check that the store is still the one that was opened.

        Raises:
            StoreError: it is not.
        """
        if self._mark is None:
            self.open()
            return
        with self.objects.store_errors("read"):
            mark = self.objects.read("store.json")
        if mark != self._mark:
            raise StoreError(
                f"the store of extractors {self.objects.url} cannot be read: "
                + ("its store.json is missing" if mark is None else "another store has taken its place")
            )

    def put(
        self, id: str, spec: ExtractorSpec, weights: str, return_nodes: dict[str, str], fingerprint: str
    ) -> tuple[Stored, bool]:
        """Create the extractor ``id`` unless it exists; the one that exists then, and whether this created it."""
        path = f"specs/{id}.json"
        content = {
            "id": id,
            "token": secrets.token_hex(8),
            "spec": spec.model_copy(update={"weights": weights}).model_dump(mode="json"),
            "return_nodes": return_nodes,
            "fingerprint": fingerprint,
            "made": time.time(),
        }
        with self.objects.store_errors("written"):
            for _ in range(5):
                if self.objects.create(path, content):
                    return _stored(path, content), True
                try:
                    existing = self.get(id)
                except DamagedObject as damaged:
                    if isinstance(damaged.__cause__, NewerVersion):
                        raise
                    self.objects.remove(path)  # to be created again
                    continue
                if existing is not None:
                    return existing, False
        raise StoreError(f"{path} in {self.objects.url} is made and deleted again and again")

    def get(self, id: str) -> Stored | None:
        """Return the extractor ``id``; None if it does not exist."""
        path = f"specs/{id}.json"
        with self.objects.store_errors("read"):
            content = self.objects.read(path)
        return None if content is None else _stored(path, content)

    def find(self, id_or_name: str) -> Stored | None:
        """Return the extractor of that id or name, or None.

        Raises:
            StoreError: the store is unavailable.
        """
        found = (self.get(id_or_name) if is_id(id_or_name) else None) or self.owner(id_or_name)
        if found is None:
            self.check()
        return found

    def owner(self, name: str) -> Stored | None:
        """Return the extractor that has ``name``; None if the name is free."""
        if not _NAME.fullmatch(name):
            return None
        with self.objects.store_errors("read"):
            return self._owner(name)[1]

    def claim(self, name: str, stored: Stored, may_replace: Callable[[str], bool]) -> str:
        """Give ``name`` to ``stored``, unless another has it that may not be replaced; the id that has it then."""
        with self.objects.store_errors("written"):
            while True:
                last, owner = self._owner(name)
                if owner is not None and (owner.id == stored.id or not may_replace(owner.id)):
                    return owner.id
                path = f"names/{name}/{last + 1}.json"
                if not self.objects.create(path, {"name": name, "id": stored.id, "token": stored.token}):
                    continue
                numbers = self._numbers(name)
                if max(numbers, default=0) > last + 1:  # another process was faster
                    self.objects.remove(path)
                    continue
                for number in numbers:
                    if number <= last:
                        self.objects.remove(f"names/{name}/{number}.json")
                if owner is not None:
                    self._notify("name", name)
                return stored.id

    def delete(self, id: str) -> bool:
        """Remove the extractor ``id``, which frees its names, and leave a notice for the other processes; False if
        there is none.

        Raises:
            StoreError: the store is unavailable or cannot be written; nothing was deleted.
        """
        if self.get(id) is None:
            self.check()
            return False
        with self.objects.store_errors("written"):
            self.objects.remove(f"specs/{id}.json")
        # It is deleted now. If the disk is too full for a notice, the others find out by a sweep.
        with suppress(StoreError), self.objects.store_errors("written"):
            self._notify("extractor", id)
        return True

    def notices(self) -> list[str]:
        """Notices of the last day: names by :func:`~service.engine.extractors.objects.unique_name`, of ``extractor``
        or ``name``."""
        with self.objects.store_errors("read"):
            return self.objects.names_in("deleted")

    def ids(self) -> set[str]:
        """Return the ids of all extractors."""
        with self.objects.store_errors("read"):
            return {file.removesuffix(".json") for file in self.objects.names_in("specs")}

    def names(self) -> list[str]:
        """Return the names that were given, those of extractors deleted lately included."""
        with self.objects.store_errors("read"):
            return self.objects.names_in("names")

    def pages(self) -> Iterator[list[tuple[Stored, str | None]]]:
        """Yield all extractors that can be read, each with one of its names, in pages.

        The names are read first, which gives empty pages: no step takes long, however many objects there are.
        """
        owned: dict[tuple[str, str], str] = {}
        with self.objects.store_errors("read"):
            for names in _in_pages(sorted(self.names())):
                for name in names:
                    owner = self._named(name)
                    if owner is not None:
                        owned[owner] = name
                yield []
            for ids in _in_pages(sorted(self.ids())):
                found = [stored for stored in map(self._listed, ids) if stored is not None]
                yield [(stored, owned.get((stored.id, stored.token))) for stored in found]

    def drop_cached(self, id: str) -> None:
        """Have :meth:`pages` read the extractor ``id`` again."""
        self._cached.drop(id)

    def prune(self) -> None:
        """Remove notices that are a day old, repeated or too many, and names that have been free for a day.

        Of the names, some are looked at each time: each is several requests to a bucket.
        """
        before = time.time() - NOTICE_SECONDS
        with self.objects.store_errors("written"):
            for notice in _old_notices(self.objects.names_in("deleted")):
                self.objects.remove(f"deleted/{notice}")
            names = self.names()
            for name in random.sample(names, min(len(names), _PRUNED_NAMES)):
                last, owner = self._owner(name)
                entry = self.objects.read(f"names/{name}/{last}.json") if last and owner is None else None
                if entry is not None and entry["made"] < before:
                    self.objects.remove(f"names/{name}/{last}.json")
                self.objects.remove_empty(f"names/{name}")
            self.objects.prune_parts(before)

    def _owner(self, name: str) -> tuple[int, Stored | None]:
        """Return the highest number under ``name``, and the extractor that it gives the name to."""
        while True:
            last = max(self._numbers(name), default=0)
            if not last:
                return 0, None
            entry = self.objects.read(f"names/{name}/{last}.json")
            if entry is None:  # another process has just claimed the name
                continue
            owner = self.get(entry["id"])
            return last, owner if owner is not None and owner.token == entry["token"] else None

    def _named(self, name: str) -> tuple[str, str] | None:
        """Return the id and the token that ``name`` was given to last, of an extractor that may be gone; None if it
        cannot be read."""
        last = max(self._numbers(name), default=0)
        path = f"names/{name}/{last}.json"
        owner = self._owners.get(path)
        if owner is None and last:
            with suppress(DamagedObject):
                entry = self.objects.read(path)
                if entry is not None:
                    owner = str(entry["id"]), str(entry["token"])
                    self._owners.put(path, owner)
        return owner

    def _listed(self, id: str) -> Stored | None:
        """Return the extractor ``id``, read once; None if it cannot be."""
        stored = self._cached.get(id)
        if stored is None:
            with suppress(DamagedObject):
                stored = self.get(id)
            if stored is not None:
                self._cached.put(id, stored)
        return stored

    def _numbers(self, name: str) -> list[int]:
        texts = (file.removesuffix(".json") for file in self.objects.names_in(f"names/{name}"))
        return [int(text) for text in texts if text.isdigit()]

    def _notify(self, kind: str, subject: str) -> None:
        self.objects.create(f"deleted/{unique_name(kind, subject)}.json", {"kind": kind, "what": subject})


def _in_pages(texts: list[str]) -> Iterator[list[str]]:
    return (texts[start : start + _PAGE] for start in range(0, len(texts), _PAGE))


def _old_notices(notices: Iterable[str]) -> list[str]:
    """Return those of ``notices`` that tell nothing any more, or are the oldest of too many."""
    now = time.time()
    old = []
    subjects: set[tuple[str, str]] = set()
    for notice in sorted(notices, key=written_at, reverse=True):
        age, subject = now - written_at(notice), kind_and_subject(notice)
        useless = age > NOTICE_SECONDS or subject in subjects or len(subjects) >= MAX_NOTICES
        if useless and age > min(_UNSEEN_SECONDS, NOTICE_SECONDS):
            old.append(notice)
        subjects.add(subject)
    return old


def is_id(text: str) -> bool:
    """Return whether ``text`` is written as ids are."""
    return _ID.fullmatch(text) is not None


def _stored(path: str, content: dict[str, Any]) -> Stored:
    try:
        return Stored(
            content["id"],
            content["token"],
            ExtractorSpec.model_validate(content["spec"]),
            dict(content["return_nodes"]),
            content["fingerprint"],
        )
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise DamagedObject(f"{path} cannot be used: {summarize(error)}") from error
