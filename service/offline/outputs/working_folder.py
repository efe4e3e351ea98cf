"""The local folder that a run writes to: the output folder itself, or a scratch folder for a bucket."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from service.offline.atomic import UNFINISHED, remove
from service.offline.folder import Folder
from service.offline.outputs import index, shards

_MIN_SECONDS, _MAX_SECONDS = 30.0, 300.0
"""Seconds between uploads of the index to a bucket: a killed run loses about this much work."""

_MAX_SHARE = 0.05
"""Maximum share of the time spent on these uploads, up to :data:`_MAX_SECONDS` between them: the index grows with the
images."""


class WorkingFolder:
    """The local folder that a run writes to. For a bucket, its files are uploaded one by one.

    The index in a bucket is downloaded at the start, and uploaded regularly and at the end. Shards that are not in the
    index are removed and computed again, as on disk. Concurrent runs into one bucket are not prevented.

    Args:
        out: the output folder.

    Attributes:
        path: the local folder.

    Raises:
        FxError: the bucket cannot be read.
    """

    def __init__(self, out: Folder) -> None:
        self._out = out
        self._scratch = tempfile.TemporaryDirectory(prefix="fxserve-") if out.disk is None else None
        self.path = out.disk or Path(self._scratch.name if self._scratch else "")
        self._upload_at = time.monotonic() + _MIN_SECONDS
        if self._scratch:
            out.get(index.FILE, self.path / index.FILE)

    def __str__(self) -> str:
        return str(self._out)

    def shards(self, suffix: str) -> list[str]:
        """List the names of the shards in the output folder."""
        return [name for name in self._out.names() if shards.is_shard(name, suffix)]

    def remove_all_but(self, suffix: str, kept: Sequence[str]) -> None:
        """Remove shards that were never added to the index, also unfinished ones."""
        for name in set(self._out.names()).difference(kept):
            if shards.is_shard(name.removesuffix(UNFINISHED), suffix):
                self._out.remove(name)

    def publish(self, name: str) -> None:
        """Upload a finished shard, for a bucket."""
        if self._scratch is not None:
            self._out.put(self.path / name)
            remove(self.path / name)

    def publish_index(self) -> None:
        """Upload the index, for a bucket, if the last upload was long enough ago."""
        began = time.monotonic()
        if self._scratch is not None and began >= self._upload_at:
            self._out.put(self.path / index.FILE)
            ended = time.monotonic()
            self._upload_at = ended + min(max(_MIN_SECONDS, (ended - began) / _MAX_SHARE), _MAX_SECONDS)

    def discard(self) -> None:
        """Remove the folder and its content; for a bucket, nothing is uploaded."""
        if self._scratch is not None:
            self._scratch.cleanup()
        else:
            shutil.rmtree(self.path)

    def close(self) -> None:
        """Upload the remaining files, for a bucket. The index must be closed."""
        if self._scratch is not None:
            try:
                for file in sorted(self.path.iterdir()):
                    self._out.put(file)
            finally:
                self._scratch.cleanup()
