"""Finding images: files, folders, globs, members of tar archives (WebDataset shards), and URLs of these."""

from __future__ import annotations

import glob
import lzma
import math
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

from fsspec.implementations.local import LocalFileSystem

from fxcore.errors import FxError
from fxcore.images.files import HEAD_BYTES, is_image, suffixes
from service.offline.failures import driver_errors, reason_of
from service.offline.folder import filesystem, is_url
from service.offline.inputs.skipped import Skipped

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

UNREADABLE = (OSError, EOFError, tarfile.TarError, ValueError, zlib.error, lzma.LZMAError)
"""Exceptions raised when reading a damaged file or archive."""

_NOT_REGULAR = "not a regular file but a pipe, a socket or a device; copy what it holds to a file"

WHOLE = -1
"""Offset of an image that is a whole file."""

Regions = Sequence[Any]
"""Boxes, points or masks of an image, in its pixels, in JSON form; see :mod:`service.codecs.requests.regions`."""


@dataclass(frozen=True)
class Source:
    """One image.

    Attributes:
        path: its absolute path or URL; ``ARCHIVE/NAME`` for a member of an archive. Bytes that are not UTF-8 are
            escaped.
        file: the file to open; bytes that are not UTF-8 are surrogate escapes.
        offset: where the image begins in the (decompressed) file, or :data:`WHOLE`.
        size: its size in bytes; None if not known yet.
        error: why it cannot be read, if that is known already.
        regions: the regions to pool, at least one; None for the whole image.
    """

    path: str
    file: str
    offset: int = WHOLE
    size: int | None = None
    error: str | None = None
    regions: Regions | None = None

    @property
    def rows(self) -> int:
        """Number of rows of its features."""
        return 1 if self.regions is None else len(self.regions)

    @property
    def in_compressed_archive(self) -> bool:
        """Whether it is in a compressed archive, which can only be read sequentially.

        Raises:
            OSError: the archive cannot be read.
        """
        return self.offset != WHOLE and _compressed(self.file)


def find(inputs: Iterable[str], skipped: Skipped | None = None) -> Iterator[Source]:
    """Yield every image in ``inputs``, in no particular order and possibly repeated.

    In folders, archives and matches of patterns, a file is an image if it has the suffix of an image format or begins
    like an image. Below the URL of a bucket only the suffix counts, because reading each object would take a request;
    everything that a pattern for a bucket matches is treated as an image. A pattern that matches none is taken as the
    name of a file or folder.

    Args:
        inputs: files with any suffix; folders, which are searched recursively for archives and images; patterns of
            :func:`glob.glob`, including ``**``; and URLs of these that fsspec has a driver for. Only the listing of a
            bucket is held in memory.
        skipped: counts the files that are not images.

    Raises:
        FxError: an input does not exist or cannot be accessed, or nothing matches a pattern.
    """
    inputs = list(inputs)
    skipped = Skipped() if skipped is None else skipped
    for text in inputs:
        if not is_url(text) and not os.path.lexists(text) and not glob.has_magic(text):
            raise FxError(f"{text}: No such file or folder")
    for text in inputs:
        path = os.path.abspath(text)
        if is_url(text):
            yield from _in_bucket(text, skipped)
        elif os.path.lexists(path):
            yield from _find_at(path, skipped)
        else:
            matched = False
            pattern = os.path.normpath(os.path.join(glob.escape(os.getcwd()), text))
            if text.endswith(os.sep):  # normpath drops it: only folders match
                pattern = os.path.join(pattern, "")
            for match in glob.iglob(pattern, recursive=True):
                matched = True
                if os.path.isdir(match):
                    if not text.endswith("**"):  # it matches folders and their files
                        yield from _in_folder(match, skipped)
                elif _is_candidate(match) or _begins_as_image(match):
                    yield from _find_at(match, skipped)
                else:
                    skipped.add(_printable(match))
            if not matched:
                raise FxError(f"{text}: nothing matches this pattern")


def _is_candidate(path: str) -> bool:
    """Return whether a file has the suffix of an image or an archive."""
    return path.lower().endswith((*suffixes(), *TAR_SUFFIXES))


def _begins_as_image(path: str) -> bool:
    """Return whether a file is an image by its content; False if it cannot be read."""
    try:
        with _open_local(path) as file:
            return is_image(file.read(HEAD_BYTES))
    except OSError:
        return False


def _find_at(path: str, skipped: Skipped) -> Iterator[Source]:
    if os.path.isdir(path):
        yield from _in_folder(path, skipped)
    elif path.lower().endswith(TAR_SUFFIXES):
        yield from _in_archive(path, skipped)
    else:
        yield Source(_printable(path), path)


def _in_bucket(url: str, skipped: Skipped) -> Iterator[Source]:
    """Yield the file at ``url``, all images below it, or all matches of a pattern."""
    fs, path = filesystem(url)
    name_of = _namer(url, fs, path)
    with driver_errors(url):
        found = fs.glob(path, detail=True) if glob.has_magic(path) else {}
        if all(info.get("type") == "directory" for info in found.values()):  # perhaps a name that has [ or ?
            if fs.isfile(path):
                found = {path: fs.info(path)}
            else:
                found = fs.find(path, detail=True)
                for place in [place for place in found if not _is_candidate(place)]:
                    del found[place]
                    skipped.add(name_of(place))
        if not found:
            raise FxError(f"{url}: no images there{f'; {skipped}' if skipped else ''}")
    for place, info in found.items():
        if info.get("type") == "directory":
            continue
        name = name_of(place)
        if info.get("type") == "other":  # a link on the local disk, which URLs may also name, or no regular file
            info = fs.info(place)
        if info.get("type") == "other":
            yield Source(name, name, error=_NOT_REGULAR)
        elif place.lower().endswith(TAR_SUFFIXES):
            yield from _in_archive(name, skipped)
        else:
            yield Source(name, name, size=info.get("size"))


def _namer(url: str, fs: Any, path: str) -> Callable[[str], str]:
    """Return the function from a path in ``fs`` to its URL, with the host or account of ``url``, which ``path`` lacks.

    What ``url`` has before its part that equals the end of ``path`` stands for what ``path`` has there:
    ``abfs://photos@account.dfs.core.windows.net/cats`` is ``photos/cats``.
    """
    url = url.rstrip("/")
    common = len(os.path.commonprefix([url[::-1], path[::-1]]))  # noqa: RUF071
    prefix, root = url[: len(url) - common], path[: len(path) - common]

    def name(place: str) -> str:
        if isinstance(fs, LocalFileSystem) or "://" not in url or not place.startswith(root):
            return str(fs.unstrip_protocol(place))
        return prefix + place.removeprefix(root)

    return name


def open_binary(file: str) -> IO[bytes]:
    """Open a local file or a URL for random access."""
    if not is_url(file):
        return _open_local(file)
    fs, path = filesystem(file)
    stream: IO[bytes] = fs.open(path, "rb")
    return stream


def _open_local(path: str) -> IO[bytes]:
    """Open a regular local file.

    Raises:
        OSError: it cannot be opened, or opening it might wait forever, as for a pipe that nobody writes.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder is refused by open itself
        raise OSError(_NOT_REGULAR)
    return open(path, "rb")


def _in_folder(root: str, skipped: Skipped) -> Iterator[Source]:
    """Yield all images below ``root``. Symbolic links are followed.

    Each folder is visited once, by its own path if that is below ``root`` too.
    """
    seen: set[tuple[int, int]] = set()
    folders, links = [root], list[str]()
    while folders or links:
        folder = (folders or links).pop()
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
                    except OSError as error:  # a link that is circular, broken or not accessible
                        yield Source(_printable(entry.path), entry.path, error=error.strerror)
                        continue
                    if is_folder:
                        (links if entry.is_symlink() else folders).append(entry.path)
                    elif name.endswith(TAR_SUFFIXES):
                        yield from _in_archive(entry.path, skipped)
                    elif name.endswith(suffixes()) or _begins_as_image(entry.path):
                        yield Source(_printable(entry.path), entry.path)
                    else:
                        skipped.add(_printable(entry.path))
        except OSError as error:
            yield Source(_printable(folder), folder, error=f"the folder cannot be read: {error.strerror}")


def _in_archive(path: str, skipped: Skipped) -> Iterator[Source]:
    shown = _printable(path)
    linked: dict[str, tuple[str, float]] = {}  # by name: target, and where that begins at the latest
    try:
        for member, stream in _members(path):
            # Where it would be unpacked: tar writes ./NAME for a folder that is packed as ".".
            name = f"{shown}/{_printable(posixpath.normpath(member.name))}"
            if member.isfile():
                linked.pop(name, None)
                if _is_image_member(member.name, member, stream):
                    yield _source(name, path, member)
                else:
                    skipped.add(name)
            elif member.islnk() or member.issym():
                folder = posixpath.dirname(member.name) if member.issym() else ""
                target = posixpath.normpath(posixpath.join(folder, member.linkname))
                # A hard link is to what has the name so far; the name of a symbolic link is looked up when it is used.
                linked[name] = target, math.inf if member.issym() else member.offset
        # A table of all members could exceed the memory; the targets of links are looked up in a second pass. As with
        # images, the last member of a name counts.
        found: set[str] = set()
        links: dict[str, list[tuple[str, float]]] = {}
        for name, (target, latest) in linked.items():
            links.setdefault(target, []).append((name, latest))
        for member, stream in _members(path) if links else ():
            for name, latest in links.get(posixpath.normpath(member.name), ()) if member.isfile() else ():
                if member.offset > latest and name in found:
                    continue
                found.add(name)
                if _is_image_member(name, member, stream):
                    yield _source(name, path, member)
                else:
                    skipped.add(name)
        for target, names in links.items():
            for name in (name for name, _ in names if name not in found):
                if name.lower().endswith(suffixes()):
                    yield Source(name, path, error=f"a link to {target}, which is not in the archive")
                else:
                    skipped.add(name)
    except UNREADABLE as error:  # members before the damage are usable
        yield Source(shown, path, error=f"the archive cannot be read to its end: {reason_of(error)}")


def _source(name: str, path: str, member: tarfile.TarInfo) -> Source:
    if member.issparse():  # it is stored in pieces, without the zeros between them
        return Source(name, path, error="it is stored as a sparse file; create the archive without --sparse")
    return Source(name, path, member.offset_data, member.size)


def _is_image_member(name: str, member: tarfile.TarInfo, stream: IO[bytes]) -> bool:
    """Return whether a member of the decompressed archive ``stream`` is an image, by its name or its content."""
    if name.lower().endswith(suffixes()):
        return True
    stream.seek(member.offset_data)
    return is_image(stream.read(min(member.size, HEAD_BYTES)))


class _Member(tarfile.TarInfo):
    """A member that raises ``ReadError`` for a damaged header, which tarfile would treat as the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not buf.strip(b"\0"):  # the real end
                raise
            raise tarfile.ReadError(str(error)) from error


def _members(path: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Yield the members of an archive, each with the decompressed archive as a seekable stream."""
    with (
        open_binary(path) as file,
        tarfile.open(fileobj=file, mode="r:*", errors="surrogateescape", tarinfo=_Member) as archive,
    ):
        stream = archive.fileobj
        assert stream is not None
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
            yield member, stream  # type: ignore[misc]


@lru_cache(64)
def _compressed(path: str) -> bool:
    """Return whether an archive is compressed, by its content."""
    try:
        with open_binary(path) as file:
            tarfile.open(fileobj=file, mode="r:").close()
    except tarfile.ReadError:
        return True
    return False


def _printable(name: str) -> str:
    """Escape bytes of a file name that are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
