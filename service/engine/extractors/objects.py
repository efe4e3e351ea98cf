"""JSON objects at a URL, shared between processes.

Objects are created exclusively and atomically, and never change: a reader never sees half of one, and if two processes
create the same one, one succeeds. Local folders use a hard link to a complete file; S3, GCS and Azure use a conditional
PUT. Other drivers are rejected.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from fxcore.errors import summarize

VERSION = 2
"""Format version of written objects, and the newest version that can be read."""

_CONDITIONAL = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"))
"""Protocols whose drivers can create an object only if it does not exist."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_PART_SECONDS = 24 * 3600.0


class StoreError(Exception):
    """The store, or one of its objects, cannot be read or written; the message says which and why."""


class Unwritable(StoreError):
    """The store cannot be written."""


class UnusableObject(StoreError):
    """One object cannot be used, such as one that a newer version wrote; the others are not affected."""


class DamagedObject(UnusableObject):
    """An object that may be replaced."""


class Objects:
    """Reads, creates and removes objects. Methods block, so do not call them on the event loop. Thread-safe.

    Methods raise :class:`StoreError` if the driver fails: :class:`Unwritable` if they were to change something.

    Args:
        url: a folder, or any URL that fsspec knows.

    Raises:
        ValueError: there is no driver for the URL, it is not installed, or it cannot create objects exclusively.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        scheme = url.partition("://")[0].rpartition("::")[2] if "://" in url else "file"
        # botocore's default timeouts are minutes
        timeouts = {"connect_timeout": 2, "read_timeout": 4, "retries": {"max_attempts": 2}}
        options: dict[str, Any] = {"config_kwargs": timeouts} if scheme in ("s3", "s3a") else {}
        try:
            self._fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        except (ImportError, ValueError) as error:
            raise ValueError(f"FXSERVE_EXTRACTORS={url}: {summarize(error)}") from error
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        if not self._local and scheme not in _CONDITIONAL:
            raise ValueError(
                f"FXSERVE_EXTRACTORS={url}: {scheme} cannot create an object only if it does not exist; use a shared "
                "folder, or a bucket of S3, GCS or Azure"
            )

    def prepare(self, *folders: str) -> None:
        """Create folders and remove the partial files of writers that died a day ago; only local disks have either."""
        if self._local:
            with self._errors(Unwritable):
                for folder in ("parts", *folders):
                    Path(self._root, folder).mkdir(parents=True, exist_ok=True)
                for part in Path(self._root, "parts").iterdir():
                    with suppress(FileNotFoundError):
                        if part.stat().st_mtime < time.time() - _PART_SECONDS:
                            part.unlink()

    def names_in(self, folder: str) -> list[str]:
        """Return the names of the objects in ``folder``; an empty list if it does not exist."""
        with self._errors(StoreError):
            try:
                paths = self._fs.ls(f"{self._root}/{folder}", detail=False)
            except FileNotFoundError:
                return []
        return [PurePosixPath(str(path)).name for path in paths]

    def read(self, path: str) -> dict[str, Any] | None:
        """Return an object; None if it does not exist.

        Raises:
            DamagedObject: it is damaged.
            UnusableObject: a newer version wrote it.
        """
        for delay in (0.02, 0.1, 0.0):
            with self._errors(StoreError):
                try:
                    data = self._fs.cat_file(f"{self._root}/{path}")
                except FileNotFoundError:
                    return None
            if data:
                break
            time.sleep(delay)  # on disks without hard links, a file is empty until it is complete
        return self._content(path, data)

    def read_all(self, folder: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the objects with these names in ``folder`` that exist and can be used.

        One that cannot be read, such as another user's file, does not affect the others. Drivers of buckets read them
        concurrently.
        """
        paths = [f"{folder}/{name}" for name in names]
        with self._errors(StoreError):
            found = self._fs.cat_ranges([f"{self._root}/{path}" for path in paths], None, None, on_error="return")
            # A bucket that may not be read refuses each object.
            passing = FileNotFoundError, IsADirectoryError, *((PermissionError,) if self._local else ())
            for error in found:
                if isinstance(error, Exception) and not isinstance(error, passing):
                    raise error
        contents = {}
        for name, path, data in zip(names, paths, found, strict=True):
            if isinstance(data, Exception):
                continue
            with suppress(UnusableObject):
                content = self._content(path, data) if data else self.read(path)  # perhaps it is being written
                if content is not None:
                    contents[name] = content
        return contents

    def _content(self, path: str, data: bytes) -> dict[str, Any]:
        unusable = f"{path} in {self._url} cannot be used"
        try:
            content: dict[str, Any] = json.loads(data)
            if not isinstance(content, dict):
                raise ValueError("it is not a JSON object")
            newer = content["version"] > VERSION
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedObject(f"{unusable}: {summarize(error)}") from error
        if newer:
            wrote = f"a newer fxserve wrote it (format {content['version']}, this one reads {VERSION})"
            raise UnusableObject(f"{unusable}: {wrote}")
        return content

    def create(self, path: str, content: dict[str, Any]) -> bool:
        """Create an object atomically. Return False if it already exists."""
        data = json.dumps({"version": VERSION, "made": time.time(), **content}).encode()
        target = f"{self._root}/{path}"
        with self._errors(Unwritable):
            try:
                if self._local:
                    _create_file(Path(target), Path(self._root, "parts", secrets.token_hex(8)), data)
                else:
                    self._fs.pipe_file(target, data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno == errno.EINVAL and not self._local and self._fs.exists(target):  # S3's 412, no cause
                    return False
                raise
        return True

    def remove(self, path: str) -> None:
        """Remove an object, if it exists."""
        with self._errors(Unwritable), suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{path}")

    @contextmanager
    def _errors(self, kind: type[StoreError]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            done = "written" if kind is Unwritable else "read"
            raise kind(f"the store of extractors {self._url} cannot be {done}: {summarize(error)}") from error


def _create_file(target: Path, part: Path, data: bytes) -> None:
    """Write ``data`` to ``part`` and link it to ``target``, which appears only when it is complete.

    Raises:
        FileExistsError: ``target`` exists.
    """
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            target.open("xb").close()
            try:
                part.replace(target)
            except OSError:
                target.unlink(missing_ok=True)
                raise
    finally:
        part.unlink(missing_ok=True)
