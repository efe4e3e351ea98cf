"""The store that processes share: specs, names and deletions of extractors, a small object each.

Under ``FXSERVE_EXTRACTORS``, a folder or any URL that fsspec knows:

- ``store.json`` marks it as a store. Without it the store is taken to be away, not to be empty.
- ``specs/ID.json`` is an extractor, which exists as long as this object does. Its token tells it from the one that was
  deleted before and from the one that is made after it.
- ``names/NAME/N.json`` gives a name to an id and a token. The highest N is the owner, and the name is free where that
  extractor, with that token, exists no more. Giving it to another creates N + 1.
- ``deleted/KIND-WHAT.TIME.TOKEN.json`` tells the others to look for an extractor, or a name's owner, again. It is kept
  for a day.

Each is created exclusively and whole, and never changes; see :mod:`service.engine.registry.objects`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fxcore.errors import summarize
from service.byte_cache import ByteCache
from service.engine.registry.objects import Damaged, NewerVersion, Objects, StoreTrouble, stamped, told_at
from service.schemas.v1 import ExtractorSpec

KEPT_SECONDS = 24 * 3600.0
"""How long a deletion is told."""

_CACHED_BYTES = 64 * 1024**2
_ID = re.compile(r"[0-9a-f]{12}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Stored:
    """An extractor in the store.

    Attributes:
        id: as :func:`~service.engine.registry.resolving.extractor_id` has it.
        token: another one each time that it is made.
        spec: its weights have their full name. The name is the one it was made with, which may be another's.
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
        url: as it was given.
        local: whether it is a folder.

    Raises:
        ValueError: there is no driver for the URL, or it is not installed.
    """

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)
        self.url = url
        self.local = self._objects.local
        self._mark: dict[str, Any] | None = None
        self._cached: ByteCache[str, Stored] = ByteCache(_CACHED_BYTES, lambda stored: len(repr(stored)))

    def open(self) -> None:
        """Make it, if it is not there, and try to write to it.

        Raises:
            StoreTrouble: it cannot be read or written, or a newer version made it.
        """
        with self._objects.as_trouble("opened"):
            self._objects.make_folders("specs", "names", "deleted", "parts")
            probe = f"parts/probe-{secrets.token_hex(8)}.json"
            self._objects.create(probe, {})
            self._objects.remove(probe)
            if self._objects.read("store.json") is None:
                self._objects.create("store.json", {"store": secrets.token_hex(8)})
            self._mark = self._objects.read("store.json")

    def check(self) -> None:
        """See that it is there and is the one that was opened.

        Raises:
            StoreTrouble: it is not.
        """
        if self._mark is None:
            self.open()
            return
        with self._objects.as_trouble("read"):
            mark = self._objects.read("store.json")
        if mark != self._mark:
            raise StoreTrouble(
                f"the store of extractors {self.url} cannot be read: "
                + ("its store.json is missing" if mark is None else "another store has taken its place")
            )

    def put(
        self, id: str, spec: ExtractorSpec, weights: str, return_nodes: dict[str, str], fingerprint: str
    ) -> tuple[Stored, bool]:
        """Create the extractor ``id`` unless it exists; the one that is there then, and whether it is this one."""
        path = f"specs/{id}.json"
        content = {
            "id": id,
            "token": secrets.token_hex(8),
            "spec": spec.model_copy(update={"weights": weights}).model_dump(mode="json"),
            "return_nodes": return_nodes,
            "fingerprint": fingerprint,
            "made": time.time(),
        }
        with self._objects.as_trouble("written"):
            for _ in range(5):
                if self._objects.create(path, content):
                    return _stored(path, content), True
                try:
                    there = self.get(id)
                except Damaged as damaged:
                    if isinstance(damaged.__cause__, NewerVersion):
                        raise
                    self._objects.remove(path)  # it is asked for anew
                    continue
                if there is not None:
                    return there, False
        raise StoreTrouble(f"{path} in {self.url} is made and deleted again and again")

    def get(self, id: str) -> Stored | None:
        """The extractor ``id``, if it exists."""
        path = f"specs/{id}.json"
        with self._objects.as_trouble("read"):
            content = self._objects.read(path)
        return None if content is None else _stored(path, content)

    def find(self, id_or_name: str) -> Stored | None:
        """The extractor of that id or name, if there is one.

        Raises:
            StoreTrouble: the store is away, so that nobody knows.
        """
        found = (self.get(id_or_name) if is_id(id_or_name) else None) or self.owner(id_or_name)
        if found is None:
            self.check()
        return found

    def owner(self, name: str) -> Stored | None:
        """The extractor that has ``name``."""
        if not _NAME.fullmatch(name):
            return None
        with self._objects.as_trouble("read"):
            return self._owner(name)[1]

    def claim(self, name: str, stored: Stored, may_replace: Callable[[str], bool]) -> str:
        """Give ``name`` to ``stored``, unless another has it that may not be replaced; the id that has it then."""
        with self._objects.as_trouble("written"):
            while True:
                last, owner = self._owner(name)
                if owner is not None and (owner.id == stored.id or not may_replace(owner.id)):
                    return owner.id
                path = f"names/{name}/{last + 1}.json"
                if not self._objects.create(path, {"name": name, "id": stored.id, "token": stored.token}):
                    continue
                numbers = self._numbers(name)
                if max(numbers, default=0) > last + 1:  # what we knew of the name was old
                    self._objects.remove(path)
                    continue
                for number in numbers:
                    if number <= last:
                        self._objects.remove(f"names/{name}/{number}.json")
                if owner is not None:
                    self._tell("name", name)
                return stored.id

    def delete(self, id: str) -> None:
        """Remove the extractor ``id``, and with it all its names, and tell the others."""
        with self._objects.as_trouble("written"):
            self._objects.remove(f"specs/{id}.json")
            self._tell("extractor", id)

    def deletions(self) -> list[str]:
        """What was deleted in the last day, as :func:`~service.engine.registry.objects.stamped` names it."""
        with self._objects.as_trouble("read"):
            return self._objects.names_in("deleted")

    def ids(self) -> set[str]:
        """The ids of all extractors."""
        with self._objects.as_trouble("read"):
            return {file.removesuffix(".json") for file in self._objects.names_in("specs")}

    def all(self) -> list[tuple[Stored, str | None]]:
        """All extractors that can be read, each with a name that it has."""
        owned: dict[tuple[str, str], str] = {}
        found = []
        with self._objects.as_trouble("read"):
            for name in self._objects.names_in("names"):
                numbers = self._numbers(name)
                with suppress(Damaged):
                    entry = self._objects.read(f"names/{name}/{max(numbers)}.json") if numbers else None
                    if entry is not None:
                        owned[entry["id"], entry["token"]] = name
            for id in sorted(self.ids()):
                stored = self._cached.get(id)
                if stored is None:
                    with suppress(Damaged):
                        stored = self.get(id)
                if stored is not None:
                    self._cached.put(id, stored)
                    found.append(stored)
        return [(stored, owned.get((stored.id, stored.token))) for stored in found]

    def forget(self, id: str) -> None:
        """Read the extractor ``id`` anew where :meth:`all` lists it."""
        self._cached.drop(id)

    def prune(self) -> None:
        """Remove what was told a day ago, and names that have been free for as long."""
        before = time.time() - KEPT_SECONDS
        with self._objects.as_trouble("written"):
            for text in self._objects.names_in("deleted"):
                if told_at(text) < before:
                    self._objects.remove(f"deleted/{text}")
            for name in self._objects.names_in("names"):
                last, owner = self._owner(name)
                entry = self._objects.read(f"names/{name}/{last}.json") if last and owner is None else None
                if entry is not None and entry["made"] < before:
                    self._objects.remove(f"names/{name}/{last}.json")
                self._objects.remove_empty(f"names/{name}")
            self._objects.prune_parts(before)

    def _owner(self, name: str) -> tuple[int, Stored | None]:
        """The highest number under ``name``, and the extractor that it gives the name to."""
        while True:
            last = max(self._numbers(name), default=0)
            if not last:
                return 0, None
            entry = self._objects.read(f"names/{name}/{last}.json")
            if entry is None:  # another has just taken it over
                continue
            owner = self.get(entry["id"])
            return last, owner if owner is not None and owner.token == entry["token"] else None

    def _numbers(self, name: str) -> list[int]:
        texts = (file.removesuffix(".json") for file in self._objects.names_in(f"names/{name}"))
        return [int(text) for text in texts if text.isdigit()]

    def _tell(self, kind: str, what: str) -> None:
        self._objects.create(f"deleted/{stamped(kind, what)}.json", {"kind": kind, "what": what})


def is_id(text: str) -> bool:
    """Whether ``text`` is written as ids are."""
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
        raise Damaged(f"{path} cannot be used: {summarize(error)}") from error
