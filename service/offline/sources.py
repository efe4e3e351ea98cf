"""Where images come from: files, folders, globs, members of tar archives (WebDataset shards), and URLs of these."""

from __future__ import annotations

import glob
import os
import posixpath
import tarfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO

from fxcore.errors import BadImage, FxError
from service.offline.folder import filesystem, is_url, reaching

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

WHOLE = -1
"""The offset of an image that is a file of its own."""

Boxes = Sequence[Sequence[float]]
"""``x1, y1, x2, y2`` each, in pixels of the image."""


@dataclass(frozen=True)
class Source:
    """One image.

    Attributes:
        path: what it is called: absolute or a URL, of a member of an archive ``ARCHIVE/NAME``.
        file: the file to open. On some systems names need not be text; those are here as Python opens them, and in
            ``path`` with their odd bytes written out.
        offset: where in the (unpacked) file the image begins, or :data:`WHOLE`.
        size: its bytes; None where that has not been looked at.
        error: why it cannot be read, where that is known before.
        boxes: the regions of it that are wanted, one at least; None where it is the whole image.
    """

    path: str
    file: str
    offset: int = WHOLE
    size: int | None = None
    error: str | None = None
    boxes: Boxes | None = None

    @property
    def rows(self) -> int:
        """Rows of features that it gives."""
        return 1 if self.boxes is None else len(self.boxes)

    @property
    def packed(self) -> bool:
        """Whether it is in a compressed archive, which can only be read from front to back."""
        return self.offset != WHOLE and _compressed(self.file)


def find(inputs: Iterable[str]) -> Iterator[Source]:
    """Every image that ``inputs`` name, in no particular order and perhaps twice; nothing is kept in memory.

    Args:
        inputs: files, which are taken whatever they are called; folders, of which all images are taken that have a
            suffix of :data:`IMAGE_SUFFIXES`, and the archives; patterns as of :func:`glob.glob`, ``**`` allowed; and
            URLs of these that fsspec has a driver for. The list of a bucket's files is in memory as a whole.

    Raises:
        FxError: an input that is not there or cannot be reached, or a pattern that nothing matches.
    """
    inputs = list(inputs)
    for text in inputs:
        if not is_url(text) and not os.path.lexists(text) and not glob.has_magic(text):
            raise FxError(f"{text}: No such file or folder")
    for text in inputs:
        path = os.path.abspath(text)
        if is_url(text):
            yield from _in_bucket(text)
        elif os.path.lexists(path):
            yield from _under(path)
        else:
            matched = False
            for match in glob.iglob(path, recursive=True):
                matched = True
                if not os.path.isdir(match) or not text.endswith("**"):  # ** gives folders and what is in them
                    yield from _under(match)
            if not matched:
                raise FxError(f"{text}: nothing matches this pattern")


def _under(path: str) -> Iterator[Source]:
    if os.path.isdir(path):
        yield from _in_folder(path)
    elif path.lower().endswith(TAR_SUFFIXES):
        yield from _in_archive(path)
    else:
        yield Source(_shown(path), path)


def _in_bucket(url: str) -> Iterator[Source]:
    """The file at ``url``, or all images below it or that match it."""
    fs, path = filesystem(url)
    with reaching(url):
        if glob.has_magic(path):
            found = fs.glob(path, detail=True)
        elif fs.isfile(path):
            found = {path: fs.info(path)}
        else:
            found = {
                place: info
                for place, info in fs.find(path, detail=True).items()
                if place.lower().endswith((*IMAGE_SUFFIXES, *TAR_SUFFIXES))
            }
        if not found:
            raise FxError(f"{url}: no images there")
    for place, info in found.items():
        if info.get("type") == "directory":
            continue
        name = fs.unstrip_protocol(place)
        if place.lower().endswith(TAR_SUFFIXES):
            yield from _in_archive(name)
        else:
            yield Source(name, name, size=info.get("size"))


def opened(file: str) -> IO[bytes]:
    """A file of this machine or at a URL; it can be read from anywhere."""
    if not is_url(file):
        return open(file, "rb")
    fs, path = filesystem(file)
    stream: IO[bytes] = fs.open(path, "rb")
    return stream


def _in_folder(root: str) -> Iterator[Source]:
    """All images below ``root``; links to folders are followed, each folder is looked at once."""
    seen: set[tuple[int, int]] = set()
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name.lower()
                    try:
                        is_folder = entry.is_dir()
                    except OSError as error:  # a link in a circle, through a file, or to where none may look
                        yield Source(_shown(entry.path), entry.path, error=error.strerror)
                        continue
                    if is_folder:
                        folders.append(entry.path)
                    elif name.endswith(IMAGE_SUFFIXES):
                        yield Source(_shown(entry.path), entry.path)
                    elif name.endswith(TAR_SUFFIXES):
                        yield from _in_archive(entry.path)
        except OSError as error:
            yield Source(_shown(folder), folder, error=f"the folder cannot be read: {error.strerror}")


def _in_archive(path: str) -> Iterator[Source]:
    shown = _shown(path)
    links: dict[str, list[str]] = {}
    try:
        for member in _members(path):
            if not member.name.lower().endswith(IMAGE_SUFFIXES):
                continue
            if member.isfile():
                yield Source(f"{shown}/{_shown(member.name)}", path, member.offset_data, member.size)
            elif member.islnk() or member.issym():
                folder = posixpath.dirname(member.name) if member.issym() else ""
                target = posixpath.normpath(posixpath.join(folder, member.linkname))
                links.setdefault(target, []).append(f"{shown}/{_shown(member.name)}")
        # Names to places of all members may be more than memory holds; those that links need are looked for again.
        for member in _members(path) if links else ():
            for name in links.pop(posixpath.normpath(member.name), ()) if member.isfile() else ():
                yield Source(name, path, member.offset_data, member.size)
        for target, names in links.items():
            yield from (Source(name, path, error=f"a link to {target}, which the archive lacks") for name in names)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        # What was found before the damage is as good as any; zlib and lzma errors are OSError or ValueError.
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        yield Source(shown, path, error=f"the archive cannot be read to its end: {said}")


def _members(path: str) -> Iterator[tarfile.TarInfo]:
    with opened(path) as file, tarfile.open(fileobj=file, mode="r:*", errors="surrogateescape") as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would remember them all
            yield member


@lru_cache(64)
def _compressed(path: str) -> bool:
    """Whether the archive is, whatever it is called."""
    try:
        with opened(path) as file:
            tarfile.open(fileobj=file, mode="r:").close()
    except tarfile.ReadError:
        return True
    except OSError:  # which reading it will tell
        return False
    return False


def _shown(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class Reader:
    """Reads images; safe to use from several threads.

    Args:
        limit: most bytes of an image.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._archive: tuple[str, tarfile.TarFile, IO[bytes]] | None = None

    def read(self, source: Source) -> bytes:
        """The encoded image.

        Raises:
            BadImage: it cannot be read, or is larger than the limit.
        """
        try:
            if source.packed:
                self._check(source.size or 0)
                return self._unpacked(source)
            if is_url(source.file):
                return self._fetched(source)
            with open(source.file, "rb") as file:
                size = os.fstat(file.fileno()).st_size if source.size is None else source.size
                self._check(size)
                if source.offset != WHOLE:
                    file.seek(source.offset)
                return file.read(size)
        except (OSError, EOFError, tarfile.TarError, ValueError) as error:
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise BadImage(said) from error

    def close(self) -> None:
        """Close the archive that was read last."""
        with self._lock:
            self._end_archive()

    def _end_archive(self) -> None:
        if self._archive is not None:
            self._archive[1].close()
            self._archive[2].close()
            self._archive = None

    def _fetched(self, source: Source) -> bytes:
        """From a URL. What is said of the image alone is its own error, any other ends the run."""
        fs, path = filesystem(source.file)
        try:
            self._check(fs.size(path) if source.size is None else source.size)
            begin = None if source.offset == WHOLE else source.offset
            end = None if begin is None else begin + (source.size or 0)
            return bytes(fs.cat_file(path, start=begin, end=end))
        except (FileNotFoundError, PermissionError, BadImage):
            raise
        except Exception as error:
            with reaching(source.file):
                raise error

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise BadImage(f"the file has {size:,} bytes; at most {self._limit:,} are taken (FXSERVE_MAX_BODY_BYTES)")

    def _unpacked(self, source: Source) -> bytes:
        """From a compressed archive, which stays open: the next image is further on in it."""
        with self._lock:
            if self._archive is None or self._archive[0] != source.file:
                self._end_archive()
                stream = opened(source.file)
                self._archive = source.file, tarfile.open(fileobj=stream, mode="r:*"), stream  # noqa: SIM115
            unpacked = self._archive[1].fileobj
            assert unpacked is not None
            unpacked.seek(source.offset)
            return bytes(unpacked.read(source.size or 0))
