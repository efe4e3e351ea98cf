"""The store that processes share: specs, names and deletions of extractors, a small object each.

Under ``FXSERVE_EXTRACTORS``, a folder or any URL that fsspec knows:

- ``store.json`` marks it as a store. Without it the store is taken to be away, not to be empty.
- ``specs/ID.json`` is an extractor, which exists as long as this object does. Its token tells it from the one that was
  deleted before and from the one that is made after it.
- ``names/NAME/N.json`` gives a name to an id and a token. The highest N is the owner, and the name is free where that
  extractor, with that token, exists no more. Giving it to another creates N + 1.
- ``deleted/KIND-WHAT.TIME.TOKEN.json`` tells the others to look for an extractor, or a name's owner, again. It is kept
  for a day.

Objects are JSON, are created exclusively and whole, and never change, so that whoever reads one has it as it is, and of
two who create the same one, one does. On a local folder that is a hard link to a file that is complete; on S3, GCS and
Azure a conditional PUT. With other drivers whoever creates an object first says so in ``parts``, and goes on only if
nobody else has said so.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from pydantic import ValidationError

from fxcore.errors import summarize
from service.byte_cache import ByteCache
from service.schemas.v1 import ExtractorSpec

VERSION = 1
"""Of the objects that are written, and the newest that are read."""

KEPT_SECONDS = 24 * 3600.0
"""How long a deletion is told."""

STALE_SECONDS = 60.0
"""After which somebody who said that they create an object is taken to have ended before that."""

_CACHED_BYTES = 64 * 1024**2
_ID = re.compile(r"[0-9a-f]{12}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CONDITIONAL = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"))
"""Protocols whose drivers create an object only where there is none."""


class StoreTrouble(Exception):
    """The store, or an object of it, cannot be read or written; the text says which and why."""


class Damaged(StoreTrouble):
    """One object is not as it was written, or was written by a newer version; the others are not concerned."""


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
        self.url = url
        scheme = url.partition("://")[0].rpartition("::")[2] if "://" in url else "file"
        # An answer that does not come is noticed after seconds, not after botocore's minutes.
        quick = {"connect_timeout": 2, "read_timeout": 4, "retries": {"max_attempts": 2}}
        options: dict[str, Any] = {"config_kwargs": quick} if scheme in ("s3", "s3a") else {}
        try:
            self._fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        except (ImportError, ValueError) as error:
            raise ValueError(f"FXSERVE_EXTRACTORS={url}: {summarize(error)}") from error
        self._root = root.rstrip("/")
        self.local = isinstance(self._fs, LocalFileSystem)
        self._conditional = scheme in _CONDITIONAL
        self._mark: dict[str, Any] | None = None
        self._cached: ByteCache[str, Stored] = ByteCache(_CACHED_BYTES, lambda stored: len(repr(stored)))

    def open(self) -> None:
        """Make it, if it is not there, and try to write to it.

        Raises:
            StoreTrouble: it cannot be read or written, or a newer version made it.
        """
        with self._told("opened"):
            if self.local:
                for folder in ("specs", "names", "deleted", "parts"):
                    Path(self._root, folder).mkdir(parents=True, exist_ok=True)
            probe = f"parts/probe-{secrets.token_hex(8)}.json"
            self._create(probe, {})
            self._fs.rm_file(self._path(probe))
            if self._read("store.json") is None:
                self._create("store.json", {"store": secrets.token_hex(8)})
            self._mark = self._read("store.json")

    def check(self) -> None:
        """See that it is there and is the one that was opened.

        Raises:
            StoreTrouble: it is not.
        """
        if self._mark is None:
            self.open()
            return
        with self._told("read"):
            mark = self._read("store.json")
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
        with self._told("written"):
            for _ in range(5):
                if self._create(path, content):
                    return _stored(path, content), True
                try:
                    there = self.get(id)
                except Damaged as damaged:
                    if isinstance(damaged.__cause__, NewerVersion):
                        raise
                    self._remove(path)  # it is asked for anew
                    continue
                if there is not None:
                    return there, False
        raise StoreTrouble(f"{path} in {self.url} is made and deleted again and again")

    def get(self, id: str) -> Stored | None:
        """The extractor ``id``, if it exists."""
        path = f"specs/{id}.json"
        with self._told("read"):
            content = self._read(path)
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
        with self._told("read"):
            return self._owner(name)[1]

    def claim(self, name: str, stored: Stored, may_replace: Callable[[str], bool]) -> str:
        """Give ``name`` to ``stored``, unless another has it that may not be replaced; the id that has it then."""
        with self._told("written"):
            while True:
                last, owner = self._owner(name)
                if owner is not None and (owner.id == stored.id or not may_replace(owner.id)):
                    return owner.id
                path = f"names/{name}/{last + 1}.json"
                if not self._create(path, {"name": name, "id": stored.id, "token": stored.token}):
                    continue
                numbers = self._numbers(name)
                if max(numbers, default=0) > last + 1:  # what we knew of the name was old
                    self._remove(path)
                    continue
                for number in numbers:
                    if number <= last:
                        self._remove(f"names/{name}/{number}.json")
                if owner is not None:
                    self._tell("name", name)
                return stored.id

    def delete(self, id: str) -> None:
        """Remove the extractor ``id``, and with it all its names, and tell the others."""
        with self._told("written"):
            self._remove(f"specs/{id}.json")
            self._tell("extractor", id)

    def deletions(self) -> list[str]:
        """What was told in the last day, a text of its own each; see :func:`told_of`."""
        with self._told("read"):
            return self._names_in("deleted")

    def ids(self) -> set[str]:
        """The ids of all extractors."""
        with self._told("read"):
            return {file.removesuffix(".json") for file in self._names_in("specs")}

    def all(self) -> list[tuple[Stored, str | None]]:
        """All extractors that can be read, each with a name that it has."""
        owned: dict[tuple[str, str], str] = {}
        found = []
        with self._told("read"):
            for name in self._names_in("names"):
                numbers = self._numbers(name)
                with suppress(Damaged):
                    entry = self._read(f"names/{name}/{max(numbers)}.json") if numbers else None
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
        with self._told("written"):
            for text in self._names_in("deleted"):
                if told_at(text) < before:
                    self._remove(f"deleted/{text}")
            for name in self._names_in("names"):
                last, owner = self._owner(name)
                entry = self._read(f"names/{name}/{last}.json") if last and owner is None else None
                if entry is not None and entry["made"] < before:
                    self._remove(f"names/{name}/{last}.json")
                if self.local:
                    with suppress(OSError):  # it has a name's owner in it
                        Path(self._path(f"names/{name}")).rmdir()
            for text in self._names_in("parts"):
                if text.startswith("creating-") and told_at(f"{text}.") < before:
                    self._remove(f"parts/{text}")
            if self.local:
                for part in Path(self._root, "parts").iterdir():
                    with suppress(FileNotFoundError):
                        if part.stat().st_mtime < before:
                            part.unlink()

    def _owner(self, name: str) -> tuple[int, Stored | None]:
        """The highest number under ``name``, and the extractor that it gives the name to."""
        while True:
            last = max(self._numbers(name), default=0)
            if not last:
                return 0, None
            entry = self._read(f"names/{name}/{last}.json")
            if entry is None:  # another has just taken it over
                continue
            owner = self.get(entry["id"])
            return last, owner if owner is not None and owner.token == entry["token"] else None

    def _numbers(self, name: str) -> list[int]:
        texts = (file.removesuffix(".json") for file in self._names_in(f"names/{name}"))
        return [int(text) for text in texts if text.isdigit()]

    def _tell(self, kind: str, what: str) -> None:
        path = f"deleted/{kind}-{what}.{time.time() * 1000:.0f}.{secrets.token_hex(4)}.json"
        self._create(path, {"kind": kind, "what": what})

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _names_in(self, folder: str) -> list[str]:
        try:
            return [PurePosixPath(str(path)).name for path in self._fs.ls(self._path(folder), detail=False)]
        except FileNotFoundError:
            if self.local and "/" not in folder:
                raise  # it was there when the store was opened
            return []

    def _read(self, path: str) -> dict[str, Any] | None:
        """An object, if it is there.

        Raises:
            Damaged: it is not what was written, or a newer version's.
        """
        for patience in (0.02, 0.1, 0.0):
            try:
                data = self._fs.cat_file(self._path(path))
            except FileNotFoundError:
                return None
            if data:
                break
            time.sleep(patience)  # where there are no hard links, a file is empty before it is complete
        try:
            content = json.loads(data)
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
            if content["version"] > VERSION:
                raise NewerVersion(f"a newer fxserve wrote it (format {content['version']}, this one reads {VERSION})")
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{path} in {self.url} cannot be used: {summarize(error)}") from error
        return content

    def _create(self, path: str, content: dict[str, Any]) -> bool:
        """Create an object, complete; whether it is new."""
        data = json.dumps({"version": VERSION, "made": time.time(), **content}).encode()
        target = self._path(path)
        if self.local:
            return _create_file(Path(target), Path(self._root, "parts", secrets.token_hex(8)), data)
        if not self._conditional:
            return self._create_alone(target, data)
        try:
            self._fs.pipe_file(target, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno == errno.EINVAL and self._fs.exists(target):  # S3's 412, where it does not say of what
                return False
            raise
        return True

    def _create_alone(self, target: str, data: bytes) -> bool:
        """:meth:`_create` where no driver's condition keeps two from creating one object.

        Each says what it is about to create before it looks who else does, so that the later one sees the earlier.
        """
        self._fs.makedirs(self._path("parts"), exist_ok=True)
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        which = hashlib.sha256(target.encode()).hexdigest()[:16]
        for _ in range(100):
            if self._fs.exists(target):
                return False
            own = f"creating-{which}.{time.time() * 1000:.0f}.{secrets.token_hex(4)}"
            self._fs.pipe_file(self._path(f"parts/{own}"), b"{}")
            try:
                others = [text for text in self._names_in("parts") if text != own and told_of(f"{text}.")[1] == which]
                if all(told_at(f"{text}.") < time.time() - STALE_SECONDS for text in others):
                    if self._fs.exists(target):
                        return False
                    self._fs.pipe_file(target, data)
                    return True
            finally:
                self._remove(f"parts/{own}")
            time.sleep(random.uniform(0.005, 0.1))
        raise TimeoutError(f"others have been creating {target} for too long")

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Raise whatever a driver raises as :class:`StoreTrouble`."""
        try:
            yield
        except StoreTrouble:
            raise
        except Exception as error:
            raise StoreTrouble(f"the store of extractors {self.url} cannot be {what}: {summarize(error)}") from error


class NewerVersion(ValueError):
    """A newer version wrote this."""


def is_id(text: str) -> bool:
    """Whether ``text`` is written as ids are."""
    return _ID.fullmatch(text) is not None


def told_of(text: str) -> tuple[str, str]:
    """Of which kind and what a text of :meth:`Store.deletions` is: ``("extractor", ID)``, ``("name", NAME)``.

    >>> told_of("name-r50.v2.1764000000000.0a1b2c3d.json")
    ('name', 'r50.v2')
    """
    kind, _, what = text.rsplit(".", 3)[0].partition("-")
    return kind, what


def told_at(text: str) -> float:
    """When it was told, in seconds since the epoch by the teller's clock; now where it does not say."""
    try:
        return int(text.rsplit(".", 3)[1]) / 1000
    except (IndexError, ValueError):
        return time.time()


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


def _create_file(target: Path, part: Path, data: bytes) -> bool:
    """Write ``data`` to ``target``, which is complete as soon as it is there; whether there was none before."""
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            if target.parent.parent.name == "names":
                target.parent.mkdir(exist_ok=True)
            os.link(part, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                target.open("xb").close()
            except FileExistsError:
                return False
            part.replace(target)
        return True
    finally:
        part.unlink(missing_ok=True)


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
