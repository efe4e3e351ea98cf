"""Folders on disk and in buckets, accessed through fsspec."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from fxcore.errors import FxError
from service.offline.atomic import write_whole
from service.offline.failures import driver_errors

# Drivers of git have other names before the @.
_WITH_PASSWORD = re.compile(r"(?:^|::)(?!git(?:hub)?:)([a-zA-Z][a-zA-Z0-9+.-]*)://[^/?#@]*:[^/?#]*@")

_HIDDEN = "\0"
"""Stands for the ``::`` of a name, at which fsspec would split it, as it does where they join URLs."""

_ARCHIVES = ("zip://", "tar://", "libarchive://")
"""URLs of members, whose archive follows after ``::``, perhaps as a path."""


def is_url(text: str) -> bool:
    """Return whether ``text`` is a URL, such as ``s3://bucket/photos``, rather than a path."""
    return "://" in text


def filesystem(url: str) -> tuple[Any, str]:
    """Get fsspec's file system for a URL or an absolute path, and the path within it.

    Raises:
        FxError: the URL has a password or no driver, the driver is not installed, or it cannot connect.
    """
    if (found := _WITH_PASSWORD.search(url)) is not None:
        protocol = found[1]
        options = "headers" if protocol.startswith("http") else "username, password"
        raise FxError(
            f"the URL {protocol}://…@{url[found.end() :]} has a password, which would be written to the output; give "
            f"it to the driver instead, in the variable FSSPEC_{protocol.upper()} as JSON ({options})"
        )
    with driver_errors(url):
        try:
            # As in zip://1.png::photos.zip and simplecache::s3://bucket/photos.
            joined = url.startswith(_ARCHIVES) or any(is_url(one) for one in url.split("::")[1:])
            fs, path = url_to_fs(url if joined else url.replace("::", _HIDDEN), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            reason = str(error).rstrip(".")
            raise FxError(f"{url}: {reason}; pip install s3fs for s3://, gcsfs for gs://, adlfs for abfs://") from error
    return fs, path.replace(_HIDDEN, "::").rstrip("/")


class Folder:
    """The output folder of a run: a folder on disk, or a prefix in a bucket.

    Attributes:
        url: a path or a URL.
        disk: the folder if it is on disk, else None.
        fs: fsspec's file system.
        root: path of the folder within it.

    Raises:
        FxError: the URL has no driver, the driver is not installed, or it cannot connect.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        text = os.fspath(place)
        self.fs, self.root = filesystem(text if is_url(text) else os.path.abspath(text))
        self.disk = Path(self.root) if isinstance(self.fs, LocalFileSystem) else None
        self.url = text

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """List the names of its files and folders; empty if it does not exist."""
        with driver_errors(self.url):
            try:
                found = self.fs.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found if str(path).rstrip("/") != self.root)

    def sizes(self, wanted: Callable[[str], bool]) -> dict[str, int]:
        """Return the size in bytes of each file or folder in it whose name is ``wanted``, by name."""
        with driver_errors(self.url):
            try:
                found = self.fs.ls(self.root, detail=True)
            except FileNotFoundError:
                return {}
            sizes = {}
            for info in found:
                name = str(info["name"]).rstrip("/").rpartition("/")[2]
                if wanted(name):
                    is_folder = info["type"] == "directory"
                    files = self.fs.find(self.path(name), detail=True).values() if is_folder else [info]
                    sizes[name] = sum(file["size"] or 0 for file in files)
        return sizes

    def path(self, name: str) -> str:
        """Return the path of ``name`` within the file system."""
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        with driver_errors(f"{self.url}/{name}"):
            try:
                return bytes(self.fs.cat_file(self.path(name)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file atomically, creating the folder if needed."""
        data = content.encode() if isinstance(content, str) else content
        if self.disk is not None:
            self.disk.mkdir(parents=True, exist_ok=True)
            write_whole(self.disk / name, lambda file: file.write_bytes(data))
            return
        with driver_errors(self.url):
            self.fs.pipe_file(self.path(name), data)

    def put(self, file: Path) -> None:
        """Upload a local file or folder. Only for buckets."""
        with driver_errors(self.url):
            self.fs.put(str(file), self.path(file.name), recursive=file.is_dir())

    def get(self, name: str, file: Path) -> bool:
        """Download ``name`` to a local file; returns whether it exists."""
        with driver_errors(f"{self.url}/{name}"):
            try:
                self.fs.get_file(self.path(name), str(file))
            except FileNotFoundError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file or folder in it, if it exists."""
        with driver_errors(self.url):
            try:
                self.fs.rm(self.path(name), recursive=True)
            except FileNotFoundError:
                return
