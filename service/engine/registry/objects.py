"""JSON objects at a URL, which several processes read and create.

Objects are created exclusively and whole, and never change, so that whoever reads one has it as it is, and of two who
create the same one, one does. On a local folder that is a hard link to a file that is complete; on S3, GCS and Azure a
conditional PUT. With other drivers whoever creates an object first says so in ``parts``, and goes on only if nobody
else has said so.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from fxcore.errors import summarize

VERSION = 1
"""Of the objects that are written, and the newest that are read."""

STALE_SECONDS = 60.0
"""After which somebody who said that they create an object is taken to have ended before that."""

_CONDITIONAL = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"))
"""Protocols whose drivers create an object only where there is none."""


class StoreTrouble(Exception):
    """The store, or an object of it, cannot be read or written; the text says which and why."""


class Damaged(StoreTrouble):
    """One object is not as it was written, or was written by a newer version; the others are not concerned."""


class NewerVersion(ValueError):
    """A newer version wrote this."""


class Objects:
    """Reads, creates and removes objects. Blocks: not for the event loop. For any thread.

    Args:
        url: a folder, or any URL that fsspec knows.

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

    def make_folders(self, *folders: str) -> None:
        """Make folders where they are not there yet; elsewhere than on a local disk nothing has to be made."""
        if self.local:
            for folder in folders:
                Path(self._root, folder).mkdir(parents=True, exist_ok=True)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def names_in(self, folder: str) -> list[str]:
        """What is in ``folder``, by name; nothing where it is not there."""
        try:
            return [PurePosixPath(str(path)).name for path in self._fs.ls(self._path(folder), detail=False)]
        except FileNotFoundError:
            if self.local and "/" not in folder:
                raise  # it was there when the store was opened
            return []

    def read(self, path: str) -> dict[str, Any] | None:
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

    def create(self, path: str, content: dict[str, Any]) -> bool:
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
        """:meth:`create` where no driver's condition keeps two from creating one object.

        Each says what it is about to create before it looks who else does, so that the later one sees the earlier.
        """
        self._fs.makedirs(self._path("parts"), exist_ok=True)
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        which = hashlib.sha256(target.encode()).hexdigest()[:16]
        for _ in range(100):
            if self._fs.exists(target):
                return False
            own = stamped("creating", which)
            self._fs.pipe_file(self._path(f"parts/{own}"), b"{}")
            try:
                others = [text for text in self.names_in("parts") if text != own and told_of(f"{text}.")[1] == which]
                if all(told_at(f"{text}.") < time.time() - STALE_SECONDS for text in others):
                    if self._fs.exists(target):
                        return False
                    self._fs.pipe_file(target, data)
                    return True
            finally:
                self.remove(f"parts/{own}")
            time.sleep(random.uniform(0.005, 0.1))
        raise TimeoutError(f"others have been creating {target} for too long")

    def remove(self, path: str) -> None:
        """Remove an object, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def remove_empty(self, folder: str) -> None:
        """Remove a folder of a local disk that has nothing in it."""
        if self.local:
            with suppress(OSError):  # there is something in it
                Path(self._path(folder)).rmdir()

    def prune_parts(self, before: float) -> None:
        """Remove what writers that ended half-way left, if it is older than ``before``, in seconds since the epoch."""
        for text in self.names_in("parts"):
            if text.startswith("creating-") and told_at(f"{text}.") < before:
                self.remove(f"parts/{text}")
        if self.local:
            for part in Path(self._root, "parts").iterdir():
                with suppress(FileNotFoundError):
                    if part.stat().st_mtime < before:
                        part.unlink()

    @contextmanager
    def as_trouble(self, what: str) -> Iterator[None]:
        """Raise whatever a driver raises as :class:`StoreTrouble`."""
        try:
            yield
        except StoreTrouble:
            raise
        except Exception as error:
            raise StoreTrouble(f"the store of extractors {self.url} cannot be {what}: {summarize(error)}") from error


def stamped(kind: str, what: str) -> str:
    """A name that nothing else has, ``KIND-WHAT.MILLISECONDS.TOKEN``."""
    return f"{kind}-{what}.{time.time() * 1000:.0f}.{secrets.token_hex(4)}"


def told_of(text: str) -> tuple[str, str]:
    """Kind and subject of what :func:`stamped` wrote.

    >>> told_of("name-r50.v2.1764000000000.0a1b2c3d.json")
    ('name', 'r50.v2')
    """
    kind, _, what = text.rsplit(".", 3)[0].partition("-")
    return kind, what


def told_at(text: str) -> float:
    """When :func:`stamped` wrote it, in seconds since the epoch by the writer's clock; now where it does not say."""
    try:
        return int(text.rsplit(".", 3)[1]) / 1000
    except (IndexError, ValueError):
        return time.time()


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
