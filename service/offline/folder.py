"""Folders on the disk and in buckets, read and written alike through fsspec."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from fxcore.errors import FxError, summarize
from service.offline.shards import write_text


def is_url(text: str) -> bool:
    """Whether ``text`` is a URL, as in ``s3://bucket/photos``, and not a path."""
    return "://" in text


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL or an absolute path, and the path in it.

    Raises:
        FxError: there is no driver for it, or it is not installed.
    """
    try:
        fs, path = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        said = str(error).rstrip(".")
        raise FxError(f"{url}: {said}; pip install s3fs for s3://, gcsfs for gs://, adlfs for abfs://") from error
    return fs, path.rstrip("/")


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn what a driver raises into an error that names ``url``.

    Raises:
        FxError: it cannot be read or written.
    """
    try:
        yield
    except FxError:
        raise
    except OSError as error:
        said = error.strerror or str(error) or type(error).__name__
        raise FxError(f"{url}: {said}") from error
    except Exception as error:  # botocore's and others' are of no common type
        raise FxError(f"{url}: {summarize(error)}") from error


class Folder:
    """The folder, or prefix of a bucket, that a run writes to.

    Attributes:
        url: an absolute path or a URL.
        disk: the folder where it is one of this machine.
        fs: fsspec's file system.
        root: the folder in it.

    Raises:
        FxError: there is no driver for the URL, or it is not installed.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        text = os.fspath(place)
        self.fs, self.root = filesystem(text if is_url(text) else os.path.abspath(text))
        self.disk = Path(text) if isinstance(self.fs, LocalFileSystem) else None
        self.url = text

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """What is in it, by name; nothing where it does not exist."""
        with reaching(self.url):
            try:
                found = self.fs.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found if str(path).rstrip("/") != self.root)

    def path(self, name: str) -> str:
        """Where ``name`` is in the file system."""
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes | None:
        """A small file, if it is there."""
        with reaching(f"{self.url}/{name}"):
            try:
                return bytes(self.fs.cat_file(self.path(name)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, text: str) -> None:
        """Write a small file, which is there as a whole or not at all; make the folder if need be."""
        if self.disk is not None:
            self.disk.mkdir(parents=True, exist_ok=True)
            write_text(self.disk / name, text)
            return
        with reaching(self.url):
            self.fs.pipe_file(self.path(name), text.encode())

    def put(self, file: Path) -> None:
        """Copy a file or folder of this machine into it; not for a folder on the disk."""
        with reaching(self.url):
            self.fs.put(str(file), self.path(file.name), recursive=file.is_dir())

    def get(self, name: str, file: Path) -> bool:
        """Copy ``name`` to this machine; whether it was there."""
        with reaching(f"{self.url}/{name}"):
            try:
                self.fs.get_file(self.path(name), str(file))
            except FileNotFoundError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file or folder in it, if it is there."""
        with reaching(self.url):
            try:
                self.fs.rm(self.path(name), recursive=True)
            except FileNotFoundError:
                return
