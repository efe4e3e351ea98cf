"""The index of an output folder: an SQLite file of all images and the locations of their features.

Each row of the table ``images`` is an image. ``shard`` and ``row`` locate its features, or those of its first region;
``error`` says why it has none; if all are NULL, the image is pending. For runs that pool boxes, points or masks, the
table ``regions`` has the regions of each image as JSON. The rows of a shard are added in one transaction after its file
is complete, so that the index never refers to missing files, and no image is computed twice. The table ``shards`` has
the size of each in bytes, by which damaged ones are noticed; shards of an older fxserve are not in it.

For runs that reduce images to statistics, the table ``statistics`` has the state of each output. It is replaced in the
transaction that marks its images as done, so that each image counts exactly once.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from fxcore.errors import FxError
from service.offline.inputs.sources import WHOLE, Regions, Source

FILE = "index.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS images (
    path TEXT PRIMARY KEY, file, "offset" INTEGER NOT NULL, size INTEGER, shard TEXT, "row" INTEGER, error TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS regions (path TEXT PRIMARY KEY, regions TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS statistics (output TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_place ON images (file, "offset");
CREATE INDEX IF NOT EXISTS by_shard ON images (shard, "row");
"""

# Finished images stay finished. If archive members have the same name the last one counts, as in tar.
_ADD = """
INSERT INTO images (path, file, "offset", size, error) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (path) DO UPDATE SET file = excluded.file, "offset" = excluded."offset", size = excluded.size,
    error = excluded.error WHERE shard IS NULL
"""

# An image may have several lists of regions, none empty: concatenate the JSON lists.
_ADD_REGIONS = """
INSERT INTO given VALUES (?, ?) ON CONFLICT (path) DO UPDATE
SET regions = substr(regions, 1, length(regions) - 1) || ',' || substr(excluded.regions, 2)
"""

_MISSING = "it has {} but is not among the images"

_BLOCK = 1024


class Counts(NamedTuple):
    """Numbers of images: all, those whose features are in shards or statistics, and those that could not be read."""

    images: int
    done: int
    unreadable: int

    @property
    def left(self) -> int:
        """Number of pending images."""
        return self.images - self.done - self.unreadable


class Index:
    """The index in ``folder``, created if needed and locked against other processes until it is closed.

    Args:
        folder: the output folder.
        read_only: open an index that exists, without locking it; for folders that cannot be written.

    Raises:
        FxError: another process has it open, it is damaged, or with ``read_only`` it cannot be read.
        sqlite3.OperationalError: it cannot be written.
    """

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        self._lock = threading.Lock()
        mode = "ro" if read_only else "rwc"
        place = f"{(folder / FILE).absolute().as_uri()}?mode={mode}"
        try:
            self._database = sqlite3.connect(place, timeout=0, isolation_level=None, check_same_thread=False, uri=True)
            try:
                if read_only:
                    self._database.execute("SELECT 1 FROM images LIMIT 1")  # fails if it is locked or damaged
                else:
                    self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
                    self._database.execute("BEGIN EXCLUSIVE")
                    self._database.execute("COMMIT")
                    self._database.executescript(_SCHEMA)
            except BaseException:
                self._database.close()  # otherwise this process would keep the lock
                raise
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise FxError(f"{folder}: another run is writing to this folder ({error})") from error
            if read_only:  # such as one with a transaction that a killed run did not end, which must be rolled back
                raise FxError(f"{folder / FILE} cannot be read ({error}); finish that run first") from error
            raise
        except sqlite3.DatabaseError as error:
            raise FxError(f"{folder / FILE} is damaged ({error}); extract into a new folder") from error

    def claim(self, run: int) -> bool:
        """Return whether the index is of the folder whose first run has this number; a new index is from now on."""
        with self._lock:
            found = self._database.execute("PRAGMA user_version").fetchone()[0]
            if not found:
                self._database.execute(f"PRAGMA user_version = {run}")
        return found in (0, run)

    def add(
        self, sources: Iterable[Source], regions: Iterable[tuple[str, Regions]] | None = None, field: str = "regions"
    ) -> None:
        """Make ``sources`` the pending images, except finished ones. Images that could not be read are retried.

        Args:
            sources: the images.
            regions: (path, regions) of images; a path may occur several times. Images without regions are skipped, and
                regions without an image are recorded as errors.
            field: name of the regions: ``boxes``, ``points`` or ``masks``.

        Raises:
            FxError: a finished image was computed with other regions.
        """
        with self._lock, self._database:
            self._database.execute("BEGIN")
            self._database.execute("DELETE FROM images WHERE shard IS NULL")
            self._database.executemany(_ADD, map(_values, sources))
            if regions is not None:
                self._add_regions(regions, field)

    def _add_regions(self, regions: Iterable[tuple[str, Regions]], field: str) -> None:
        run = self._database.execute
        run("CREATE TEMPORARY TABLE given (path TEXT PRIMARY KEY, regions TEXT NOT NULL) WITHOUT ROWID")
        self._database.executemany(_ADD_REGIONS, ((path, orjson.dumps(given).decode()) for path, given in regions))
        other = run(
            "SELECT path FROM given JOIN regions USING (path) JOIN images USING (path) "
            "WHERE shard IS NOT NULL AND given.regions != regions.regions LIMIT 1"
        ).fetchone()
        if other is not None:
            raise regions_changed(other[0], field)
        run("REPLACE INTO regions SELECT path, regions FROM given")
        run("DELETE FROM images WHERE shard IS NULL AND path NOT IN (SELECT path FROM given)")
        run(
            'INSERT INTO images (path, file, "offset", error) SELECT path, path, ?, ? FROM given '
            "WHERE path NOT IN (SELECT path FROM images)",
            (WHOLE, _MISSING.format(field)),
        )
        run("DROP TABLE given")

    def keep_shards(self, sizes: Mapping[str, int]) -> list[str]:
        """Keep only the shards in ``sizes`` that have the size in bytes that they were written with.

        Images in other shards become pending again. Return the names of these.
        """
        query = (
            "SELECT DISTINCT shard, shards.size FROM images LEFT JOIN shards ON name = shard WHERE shard IS NOT NULL"
        )
        with self._lock, self._database:
            self._database.execute("BEGIN")
            known = self._database.execute(query).fetchall()
            lost = [name for name, size in known if name not in sizes or size not in (None, sizes[name])]
            for name in lost:
                self._database.execute('UPDATE images SET shard = NULL, "row" = NULL WHERE shard = ?', (name,))
                self._database.execute("DELETE FROM shards WHERE name = ?", (name,))
        return lost

    def shards(self) -> list[str]:
        """List the names of the indexed shards, in order."""
        with self._lock:
            found = self._database.execute("SELECT DISTINCT shard FROM images WHERE shard IS NOT NULL ORDER BY shard")
            return [shard for (shard,) in found]

    def counts(self) -> Counts:
        """Count the images."""
        with self._lock:
            query = "SELECT count(*), count(shard), count(error) FROM images"
            return Counts(*self._database.execute(query).fetchone())

    def pending(self) -> Iterator[list[Source]]:
        """Yield pending images in blocks: files by name, then members of an archive by offset, with links to them."""
        query = (
            'SELECT file, "offset", path, size, regions FROM images LEFT JOIN regions USING (path) '
            'WHERE (file, "offset", path) > (?, ?, ?) AND shard IS NULL AND error IS NULL ORDER BY file, "offset", path'
        )
        for block in self._blocks(query, "", -2, ""):
            yield [
                Source(
                    path, os.fsdecode(file), offset, size, regions=None if regions is None else orjson.loads(regions)
                )
                for file, offset, path, size, regions in block
            ]

    def _blocks(self, query: str, *after: object) -> Iterator[list[Any]]:
        """Yield the rows of ``query`` in blocks. Its first columns give the order; each block follows ``after``."""
        while True:
            with self._lock:
                block = self._database.execute(f"{query} LIMIT {_BLOCK}", after).fetchall()
            if not block:
                return
            yield block
            after = block[-1][: len(after)]

    def commit(
        self,
        file: str,
        paths: Sequence[str],
        errors: Sequence[tuple[str, str]],
        statistics: Mapping[str, bytes] | None = None,
        size: int | None = None,
    ) -> None:
        """Add the images of a finished shard, or replace the statistics by those of more images, in one transaction.

        Args:
            file: name of the shard, or of the file that will hold the statistics.
            paths: path of each row's image. An image with several rows (its regions) is indexed at the first.
            errors: (path, reason) of images that could not be read.
            statistics: output → its statistics, to which the images were added. Such images have no row.
            size: size of the shard in bytes.
        """
        first: dict[str, int] = {}
        for row, path in enumerate(paths):
            first.setdefault(path, row)
        with self._lock, self._database:
            self._database.execute("BEGIN")
            if size is not None:
                self._database.execute("REPLACE INTO shards VALUES (?, ?)", (file, size))
            if statistics is not None:
                self._database.executemany("REPLACE INTO statistics VALUES (?, ?)", statistics.items())
            self._database.executemany(
                'UPDATE images SET shard = ?, "row" = ? WHERE path = ?',
                ((file, row if statistics is None else None, path) for path, row in first.items()),
            )
            self._database.executemany(
                "UPDATE images SET error = ? WHERE path = ?", ((reason, path) for path, reason in errors)
            )

    def add_finished(self, other: Index) -> None:
        """Add the images of ``other`` that are done or could not be read, with their regions.

        Raises:
            FxError: an image is done in both.
        """
        query = (
            'SELECT path, file, "offset", size, shard, error, regions FROM images LEFT JOIN regions USING (path) '
            "WHERE path > ? AND (shard IS NOT NULL OR error IS NOT NULL) ORDER BY path"
        )
        for block in other._blocks(query, ""):
            with self._lock, self._database:
                self._database.execute("BEGIN")
                for path, file, offset, size, shard, error, regions in block:
                    known = self._database.execute("SELECT shard FROM images WHERE path = ?", (path,)).fetchone()
                    if known is not None and known[0] is not None:
                        if shard is not None:
                            raise FxError(f"{path} is in several of the folders; each image may count only once")
                        continue
                    self._database.execute(
                        'REPLACE INTO images (path, file, "offset", size, shard, error) VALUES (?, ?, ?, ?, ?, ?)',
                        (path, file, offset, size, shard, error),
                    )
                    if regions is not None:
                        self._database.execute("REPLACE INTO regions VALUES (?, ?)", (path, regions))

    def statistics(self) -> dict[str, bytes]:
        """Return the statistics of each output; empty if there are none."""
        with self._lock:
            return dict(self._database.execute("SELECT output, state FROM statistics"))

    def finished(self, paths: Sequence[str]) -> set[str]:
        """Return the subset of ``paths`` that are in a shard or could not be read."""
        found: set[str] = set()
        with self._lock:
            query = "SELECT 1 FROM images WHERE path = ? AND (shard IS NOT NULL OR error IS NOT NULL)"
            for path in paths:
                if self._database.execute(query, (path,)).fetchone():
                    found.add(path)
        return found

    def errors(self) -> Iterator[tuple[str, str]]:
        """Yield (path, reason) of every image that could not be read, ordered by path."""
        query = "SELECT path, error FROM images WHERE path > ? AND error IS NOT NULL ORDER BY path"
        for block in self._blocks(query, ""):
            yield from block

    def forget_errors(self) -> None:
        """Make images that could not be read pending again."""
        with self._lock, self._database:
            self._database.execute("UPDATE images SET error = NULL")

    def regions(self, path: str) -> Regions | None:
        """Return the regions of an image, or None."""
        with self._lock:
            found = self._database.execute("SELECT regions FROM regions WHERE path = ?", (path,)).fetchone()
        return None if found is None else orjson.loads(found[0])

    def close(self) -> None:
        """Close and unlock the file."""
        with self._lock:
            self._database.close()


def regions_changed(path: str, field: str) -> FxError:
    """Return the error for an image that was extracted with other regions (``field``) than those requested now."""
    return FxError(f"{path} was extracted with different {field}; use a new folder")


def _values(source: Source) -> tuple[object, ...]:
    try:
        source.file.encode()
    except UnicodeEncodeError:  # the name is not valid UTF-8
        return source.path, os.fsencode(source.file), source.offset, source.size, source.error
    return source.path, source.file, source.offset, source.size, source.error
