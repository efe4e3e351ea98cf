"""Atomic file writes: a file appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

UNFINISHED = ".part"
"""Suffix of a file that is being written."""


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Write a file or folder to disk atomically and durably: ``target`` appears once it is complete and flushed.

    Args:
        target: where it appears.
        write: writes it to the path passed in.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = target.with_name(target.name + UNFINISHED)
    remove(unfinished)
    try:
        write(unfinished)
        for part in sorted(unfinished.rglob("*")) if unfinished.is_dir() else ():
            _fsync(part)
        _fsync(unfinished)
        os.replace(unfinished, target)
        _fsync(target.parent)
    finally:
        remove(unfinished)


def remove(file: Path) -> None:
    """Remove a file, or a folder and its contents, if it exists."""
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _fsync(file: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not file.is_dir():  # some file systems do not support it for folders
            raise
    finally:
        os.close(handle)
