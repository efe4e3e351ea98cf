"""Which images there are, and where the features of each are: one SQLite file in the output folder.

A row of the table ``images`` is an image. ``shard`` and ``row`` say where its features are, or those of its first box;
``error`` why there are none; where all are NULL it is still to be done. The table ``boxes`` has the boxes of each image
as JSON, where features are of boxes. A shard's rows are entered in one transaction once its file is whole
and in place, so the index never names what is not there, and no image is done twice.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from fxcore.errors import FxError
from service.offline.sources import WHOLE, Boxes, Source

FILE = "index.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS images (
    path TEXT PRIMARY KEY, file, "offset" INTEGER NOT NULL, size INTEGER, shard TEXT, "row" INTEGER, error TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS boxes (path TEXT PRIMARY KEY, boxes TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_place ON images (file, "offset");
CREATE INDEX IF NOT EXISTS by_shard ON images (shard, "row");
"""

# What was done stays so. Of members of an archive that have one name the last counts, as it does for tar.
_ENTER = """
INSERT INTO images (path, file, "offset", size, error) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (path) DO UPDATE SET file = excluded.file, "offset" = excluded."offset", size = excluded.size,
    error = excluded.error WHERE shard IS NULL
"""

# Boxes of an image are in one row or several: lists of JSON, of which none is empty, joined.
_GIVE = """
INSERT INTO given VALUES (?, ?) ON CONFLICT (path) DO UPDATE
SET boxes = substr(boxes, 1, length(boxes) - 1) || ',' || substr(excluded.boxes, 2)
"""

_NOT_THERE = "it has boxes, and is not among the images"

_BLOCK = 1024


class Index:
    """The index in ``folder``, made if there is none. No other process can open it until it is closed.

    Raises:
        FxError: another process has it open, or it is damaged.
        sqlite3.OperationalError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(folder / FILE, timeout=0, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("BEGIN EXCLUSIVE")
            self._database.execute("COMMIT")
            self._database.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            raise FxError(f"{folder}: another run is writing to this folder ({error})") from error
        except sqlite3.DatabaseError as error:
            raise FxError(f"{folder / FILE} is damaged ({error}); extract into a new folder") from error

    def enter(self, sources: Iterable[Source], boxes: Iterable[tuple[str, Boxes]] | None = None) -> None:
        """Take ``sources`` as what there is to do, beside what was done. What could not be read is tried again.

        Args:
            sources: the images.
            boxes: (path, boxes) of those that are wanted; a path may come again, with more. One that is not among the
                images cannot be read.

        Raises:
            FxError: boxes of an image are others than those that were done.
        """
        with self._lock, self._database:
            self._database.execute("BEGIN")
            self._database.execute("DELETE FROM images WHERE shard IS NULL")
            self._database.executemany(_ENTER, map(_values, sources))
            if boxes is not None:
                self._enter_boxes(boxes)

    def _enter_boxes(self, boxes: Iterable[tuple[str, Boxes]]) -> None:
        run = self._database.execute
        run("CREATE TEMPORARY TABLE given (path TEXT PRIMARY KEY, boxes TEXT NOT NULL) WITHOUT ROWID")
        self._database.executemany(_GIVE, ((path, orjson.dumps(of_image).decode()) for path, of_image in boxes))
        other = run(
            "SELECT path FROM given JOIN boxes USING (path) JOIN images USING (path) "
            "WHERE shard IS NOT NULL AND given.boxes != boxes.boxes LIMIT 1"
        ).fetchone()
        if other is not None:
            raise other_boxes(other[0])
        run("REPLACE INTO boxes SELECT path, boxes FROM given")
        run("DELETE FROM images WHERE shard IS NULL AND path NOT IN (SELECT path FROM given)")
        run(
            'INSERT INTO images (path, file, "offset", error) SELECT path, path, ?, ? FROM given '
            "WHERE path NOT IN (SELECT path FROM images)",
            (WHOLE, _NOT_THERE),
        )
        run("DROP TABLE given")

    def keep(self, shards: Iterable[str]) -> None:
        """Keep only these shards; images in any other are to be done again."""
        kept = set(shards)
        with self._lock, self._database:
            self._database.execute("BEGIN")
            known = self._database.execute("SELECT DISTINCT shard FROM images WHERE shard IS NOT NULL").fetchall()
            for (shard,) in known:
                if shard not in kept:
                    self._database.execute('UPDATE images SET shard = NULL, "row" = NULL WHERE shard = ?', (shard,))

    def shards(self) -> list[str]:
        """The names of the shards that count, in order."""
        with self._lock:
            found = self._database.execute("SELECT DISTINCT shard FROM images WHERE shard IS NOT NULL ORDER BY shard")
            return [shard for (shard,) in found]

    def counts(self) -> tuple[int, int, int]:
        """Images in all, images in shards, images that cannot be read."""
        with self._lock:
            found = self._database.execute("SELECT count(*), count(shard), count(error) FROM images").fetchone()
            return found[0], found[1], found[2]

    def left(self) -> Iterator[list[Source]]:
        """What is still to be done, in blocks: files by name, members of an archive by their place in it."""
        after: tuple[object, int] = ("", -2)
        while True:
            with self._lock:
                block = self._database.execute(
                    'SELECT path, file, "offset", size, boxes FROM images LEFT JOIN boxes USING (path) '
                    'WHERE (file, "offset") > (?, ?) '
                    'AND shard IS NULL AND error IS NULL ORDER BY file, "offset" LIMIT ?',
                    (*after, _BLOCK),
                ).fetchall()
            if not block:
                return
            after = block[-1][1], block[-1][2]
            yield [
                Source(path, os.fsdecode(file), offset, size, boxes=None if boxes is None else orjson.loads(boxes))
                for path, file, offset, size, boxes in block
            ]

    def commit(self, shard: str, paths: Sequence[str], errors: Sequence[tuple[str, str]]) -> None:
        """Enter a shard's rows, and (path, reason) of images that cannot be read. An image with several rows, its boxes
        one after another, is entered at the first."""
        first: dict[str, int] = {}
        for row, path in enumerate(paths):
            first.setdefault(path, row)
        with self._lock, self._database:
            self._database.execute("BEGIN")
            self._database.executemany(
                'UPDATE images SET shard = ?, "row" = ? WHERE path = ?',
                ((shard, row, path) for path, row in first.items()),
            )
            self._database.executemany(
                "UPDATE images SET error = ? WHERE path = ?", ((reason, path) for path, reason in errors)
            )

    def known(self, paths: Sequence[str]) -> set[str]:
        """Those of ``paths`` that are done or cannot be read."""
        found: set[str] = set()
        with self._lock:
            ask = "SELECT 1 FROM images WHERE path = ? AND (shard IS NOT NULL OR error IS NOT NULL)"
            for path in paths:
                if self._database.execute(ask, (path,)).fetchone():
                    found.add(path)
        return found

    def errors(self) -> Iterator[tuple[str, str]]:
        """(path, reason) of every image that cannot be read, by path."""
        after = ""
        while True:
            with self._lock:
                block = self._database.execute(
                    "SELECT path, error FROM images WHERE path > ? AND error IS NOT NULL ORDER BY path LIMIT ?",
                    (after, _BLOCK),
                ).fetchall()
            if not block:
                return
            yield from block
            after = block[-1][0]

    def forget_errors(self) -> None:
        """Take images that cannot be read as still to be done."""
        with self._lock, self._database:
            self._database.execute("UPDATE images SET error = NULL")

    def boxes(self, path: str) -> Boxes | None:
        """The boxes of an image, if there are any."""
        with self._lock:
            found = self._database.execute("SELECT boxes FROM boxes WHERE path = ?", (path,)).fetchone()
        return None if found is None else orjson.loads(found[0])

    def close(self) -> None:
        """Close the file, so that another process may open it."""
        with self._lock:
            self._database.close()


def other_boxes(path: str) -> FxError:
    """What is wrong where the rows of an image are of other boxes than are wanted now."""
    return FxError(f"{path} was done with other boxes: extract into a new folder")


def _values(source: Source) -> tuple[object, ...]:
    try:
        source.file.encode()
    except UnicodeEncodeError:  # a name that is not text
        return source.path, os.fsencode(source.file), source.offset, source.size, source.error
    return source.path, source.file, source.offset, source.size, source.error
