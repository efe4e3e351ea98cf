"""The temporary folder of several server processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "fxserve-processes-"
_LOCK = "lock"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a temporary folder, which is locked as long as this process or one forked from it lives.

    Folders of servers that were killed before they could remove them are removed now.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        if sys.platform == "win32":
            yield folder
            return
        import fcntl

        for other in folder.parent.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # it is new, or gone
                if other.lstat().st_uid != os.getuid():  # its lock may be a pipe, where opening waits
                    continue
                with (other / _LOCK).open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other)
        with (folder / "unlocked").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(file.name, folder / _LOCK)  # others look for it only from now on
            yield folder
