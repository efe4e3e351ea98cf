"""The local folder that a run writes to: the output folder itself, or a scratch folder for a bucket."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import orjson

from service.offline.atomic import UNFINISHED, remove
from service.offline.folder import Folder
from service.offline.outputs import shards
from service.offline.outputs.index import FILE, Index

_log = logging.getLogger("fxserve.offline")

_ERRORS = "errors.jsonl"

_MIN_SECONDS, _MAX_SECONDS = 30.0, 300.0
"""Seconds between uploads of the index to a bucket: a killed run loses about this much work."""

_MAX_SHARE = 0.05
"""Maximum share of the time spent on these uploads, up to :data:`_MAX_SECONDS` between them: the index grows with the
images."""


class WorkingFolder:
    """The local folder that a run writes to, created if needed. For a bucket, its files are uploaded one by one.

    The index in a bucket is downloaded at the start, and uploaded regularly and at the end. Shards that are not in the
    index are removed and computed again, as on disk. Concurrent runs into one bucket are not prevented.

    Args:
        out: the output folder.

    Attributes:
        path: the local folder.
        index: its index.

    Raises:
        FxError: the bucket cannot be read, or the index cannot be opened.
    """

    def __init__(self, out: Folder) -> None:
        self._out = out
        self._scratch = tempfile.TemporaryDirectory(prefix="fxserve-") if out.disk is None else None
        self.path = out.disk or Path(self._scratch.name if self._scratch else "")
        self._upload_at = time.monotonic() + _MIN_SECONDS
        if self._scratch:
            out.get(FILE, self.path / FILE)
        else:
            self.path.mkdir(parents=True, exist_ok=True)
        self.index = Index(self.path)

    def __str__(self) -> str:
        return str(self._out)

    def match_shards(self, suffix: str) -> None:
        """Remove missing and damaged shards from the index, and those that are not in it, also unfinished ones."""
        names = self._out.names()
        sizes = self._out.sizes(lambda name: shards.is_shard(name, suffix))
        lost = self.index.keep_shards(sizes)
        for name in sizes.keys() & lost:
            _log.warning("%s/%s was changed since it was written; its images are computed again", self, name)
        if lost and self._scratch is not None:
            # Their names are given to other rows. If this run were killed, the old index would refer to those.
            self._out.put(self.path / FILE)
        for name in set(names).difference(self.index.shards()):
            if shards.is_shard(name.removesuffix(UNFINISHED), suffix):
                self._out.remove(name)

    def commit(
        self,
        file: str,
        paths: Sequence[str],
        errors: Sequence[tuple[str, str]],
        statistics: Mapping[str, bytes] | None = None,
        size: int | None = None,
    ) -> None:
        """Add images to the index, see :meth:`Index.commit`, and list those that could not be read."""
        self.index.commit(file, paths, errors, statistics, size)
        self.publish_index()
        self._write_errors(errors, "ab")

    def list_errors(self) -> None:
        """List all images of the index that could not be read."""
        self._write_errors(self.index.errors(), "wb")

    def publish(self, name: str) -> int:
        """Upload a finished shard, for a bucket. Return its size in bytes."""
        shard = self.path / name
        files = [file for file in shard.rglob("*") if file.is_file()] if shard.is_dir() else [shard]
        size = sum(file.stat().st_size for file in files)
        if self._scratch is not None:
            self._out.put(shard)
            remove(shard)
        return size

    def publish_index(self) -> None:
        """Upload the index, for a bucket, if the last upload was long enough ago."""
        began = time.monotonic()
        if self._scratch is not None and began >= self._upload_at:
            self._out.put(self.path / FILE)
            ended = time.monotonic()
            self._upload_at = ended + min(max(_MIN_SECONDS, (ended - began) / _MAX_SHARE), _MAX_SECONDS)

    def discard(self) -> None:
        """Remove the folder and its content; for a bucket, nothing is uploaded."""
        self.index.close()
        if self._scratch is not None:
            self._scratch.cleanup()
        else:
            shutil.rmtree(self.path)

    def close(self) -> None:
        """Close the index and, for a bucket, upload the remaining files."""
        self.index.close()
        if self._scratch is not None:
            try:
                for file in sorted(self.path.iterdir()):
                    self._out.put(file)
            finally:
                self._scratch.cleanup()

    def _write_errors(self, errors: Iterable[tuple[str, str]], mode: Literal["ab", "wb"]) -> None:
        with (self.path / _ERRORS).open(mode) as file:
            for path, reason in errors:
                file.write(orjson.dumps({"path": path, "error": reason}, option=orjson.OPT_APPEND_NEWLINE))
