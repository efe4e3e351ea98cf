"""The files in which server processes share their metrics (prometheus_client's multiprocess mode).

prometheus_client maps sparse files into memory. On a full disk, writing to a page of such a file that was never written
before ends the process (SIGBUS). So the pages are allocated when a file is created, and if they cannot be, the values
stay in this process.
"""

from __future__ import annotations

import logging
import os

from prometheus_client import values

_Mapped = getattr(values, "MmapedDict", object)
"""prometheus_client's private class of the files; ``object`` if there is no such class any more."""

log = logging.getLogger("fxserve")

_BYTES = 256 * 1024
"""Allocated bytes of a file: more than all series of a type of metric take (some 100 KiB)."""


def allocate_files() -> None:
    """Make prometheus_client allocate its files before it writes to them, where the system can."""
    if _Mapped is not object and hasattr(os, "posix_fallocate") and hasattr(os, "memfd_create"):
        values.MmapedDict = _Allocated  # type: ignore[attr-defined, unused-ignore]


class _Allocated(_Mapped):  # type: ignore[misc, valid-type]
    def __init__(self, filename: str, read_mode: bool = False) -> None:
        super().__init__(filename if read_mode else _allocated(filename), read_mode)


def _allocated(filename: str) -> str:
    """Allocate a file, and return its name or, if there is no room, that of a file in memory."""
    try:
        with open(filename, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, _BYTES)
    except OSError as error:
        log.warning("/metrics lacks what this process counts: %s", error)
        return f"/proc/self/fd/{os.memfd_create('metrics')}"
    return filename
