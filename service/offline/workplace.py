"""Where a run writes its files before they count: the output folder itself, or a scratch folder beside a bucket."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from service.offline import index, shards
from service.offline.folder import Folder

_INDEX_SECONDS = 30.0
"""Between two copies of the index to a bucket, and about the work that a kill may cost there."""


class Workplace:
    """The folder of this machine that a run writes to. What is for a bucket goes there file by file.

    Of an output in a bucket, the index is fetched at the beginning, and copied back now and then and at the end: shards
    that it does not name yet are removed and done again, as on a disk. Two runs at a time are not kept apart there.

    Args:
        out: the output.

    Attributes:
        folder: of this machine.

    Raises:
        FxError: the bucket cannot be read.
    """

    def __init__(self, out: Folder) -> None:
        self._out = out
        self._scratch = tempfile.TemporaryDirectory(prefix="fxserve-") if out.disk is None else None
        self.folder = out.disk or Path(self._scratch.name if self._scratch else "")
        self._copied = time.monotonic()
        if self._scratch:
            out.get(index.FILE, self.folder / index.FILE)

    def __str__(self) -> str:
        return str(self._out)

    def shards(self, suffix: str) -> list[str]:
        """The names of the shards that are there."""
        return [name for name in self._out.names() if name.startswith("shard-") and name.endswith(suffix)]

    def remove_all_but(self, suffix: str, kept: Sequence[str]) -> None:
        """Remove shards that were begun and never entered in the index."""
        if self._scratch is None:
            shards.remove_all_but(self.folder, suffix, kept)
        else:
            for name in set(self.shards(suffix)).difference(kept):
                self._out.remove(name)

    def put(self, name: str) -> None:
        """Bring a shard that was written to where it belongs."""
        if self._scratch is not None:
            self._out.put(self.folder / name)
            shards.remove(self.folder / name)

    def committed(self) -> None:
        """Take note that the index has changed."""
        if self._scratch is not None and time.monotonic() - self._copied > _INDEX_SECONDS:
            self._out.put(self.folder / index.FILE)
            self._copied = time.monotonic()

    def close(self) -> None:
        """Bring the rest there. The index has to be closed."""
        if self._scratch is not None:
            try:
                for file in sorted(self.folder.iterdir()):
                    self._out.put(file)
            finally:
                self._scratch.cleanup()
