"""Reading images from files, archives and URLs."""

from __future__ import annotations

import os
import tarfile
import threading
import time
from typing import IO

from fxcore.errors import BadImage, FxError, summarize
from service.offline.failures import driver_errors, reason_of
from service.offline.folder import filesystem, is_url
from service.offline.inputs.sources import UNREADABLE, WHOLE, Source, open_binary

_RETRY_DELAYS = (0.5, 2.0)
"""Seconds before each further attempt to read from a URL."""

_MAX_FAILURES = 50
"""Number of failures in a row to read from URLs that ends the run: the images are not their cause."""

_FORBIDDEN = (401, 403, 407)
"""Statuses that HTTP servers also answer when a token or a signed URL has expired."""


class Reader:
    """Reads encoded images. Thread-safe.

    Args:
        limit: maximum bytes of an image.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._archive: tuple[str, tarfile.TarFile, IO[bytes]] | None = None
        self._failures = 0

    def read(self, source: Source) -> bytes:
        """Read an encoded image.

        Raises:
            BadImage: it cannot be read, or is larger than the limit.
            FxError: none of the last images could be read from their URLs.
        """
        try:
            return self._read_remote(source) if is_url(source.file) else self._read(source)
        except UNREADABLE as error:
            raise BadImage(reason_of(error)) from error

    def close(self) -> None:
        """Close the open archive."""
        with self._lock:
            self._close_archive()

    def _close_archive(self) -> None:
        if self._archive is not None:
            self._archive[1].close()
            self._archive[2].close()
            self._archive = None

    def _read_remote(self, source: Source) -> bytes:
        """Read from a URL, with retries unless the file is missing, forbidden or damaged.

        All but missing and damaged files count as failures.
        """
        for delay in (*_RETRY_DELAYS, 0.0):
            try:
                data = self._read(source)
            except (FileNotFoundError, FxError):
                raise
            except Exception as error:  # errors of drivers have no common base class
                if isinstance(error, UNREADABLE) and not isinstance(error, OSError):  # it is damaged
                    raise
                failure = error
                if isinstance(error, PermissionError) or _status(error) in _FORBIDDEN:
                    break
                if _refused(error):
                    raise BadImage(summarize(error)) from error
                time.sleep(delay)
            else:
                self._failures = 0
                return data
        self._failures += 1
        if self._failures < _MAX_FAILURES:
            raise BadImage(summarize(failure)) from failure
        with driver_errors(source.file):
            raise failure

    def _read(self, source: Source) -> bytes:
        if source.in_compressed_archive:
            self._check(source.size or 0)
            return self._read_compressed(source)
        if is_url(source.file):
            return self._read_url(source)
        with open_binary(source.file) as file:
            size = os.fstat(file.fileno()).st_size if source.size is None else source.size
            self._check(size)
            if source.offset != WHOLE:
                file.seek(source.offset)
            return file.read(size)

    def _read_url(self, source: Source) -> bytes:
        fs, path = filesystem(source.file)
        if source.size == 0:  # HTTP has no empty ranges; servers would send the whole archive, or fail
            return b""
        size = fs.size(path) if source.size is None else source.size
        self._check(size or 0)
        begin = None if source.offset == WHOLE else source.offset
        end = None if begin is None else begin + (source.size or 0)
        data = bytes(fs.cat_file(path, start=begin, end=end))
        self._check(len(data))  # servers need not tell the size in advance
        return data

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise BadImage(f"the file has {size:,} bytes; at most {self._limit:,} are allowed (FXSERVE_MAX_BODY_BYTES)")

    def _read_compressed(self, source: Source) -> bytes:
        """Read from a compressed archive. It stays open, because the next image usually follows this one."""
        with self._lock:
            if self._archive is None or self._archive[0] != source.file:
                self._close_archive()
                stream = open_binary(source.file)
                self._archive = source.file, tarfile.open(fileobj=stream, mode="r:*"), stream  # noqa: SIM115
            unpacked = self._archive[1].fileobj
            assert unpacked is not None
            unpacked.seek(source.offset)
            return bytes(unpacked.read(source.size or 0))


def _refused(error: Exception) -> bool:
    """Return whether a server refused to send a file, and would again."""
    return 400 <= _status(error) < 500 and _status(error) not in (408, 425, 429)


def _status(error: Exception) -> int:
    """Return the HTTP status of an error, or 0."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else 0
