"""Other processes."""

from __future__ import annotations

import psutil


def running(process: int) -> bool:
    """Return whether the process with that id runs; one that has ended may wait for its parent to notice."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
