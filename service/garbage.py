"""Configuration of Python's garbage collector.

Importing the service creates about 400,000 permanent objects. A full collection visits all of them and stops all
threads for 0.2 s, so they are exempt. Objects created later, about 10,000 per extractor for its graph, are collected as
usual, and once more after each deletion.

This module imports nothing heavy, because commands import it first.
"""

from __future__ import annotations

import atexit
import gc

_THRESHOLD = 10_000
"""Number of new objects that triggers a collection; Python's default is 700."""


def collect_rarely() -> None:
    """Raise the collector's threshold.

    Calling it first shortens the start: imports create permanent objects, and collections during them find nothing.
    """
    gc.set_threshold(_THRESHOLD, *gc.get_threshold()[1:])


def exempt_imports() -> None:
    """Exempt all existing objects from collections until the process ends. Call it once, before anything is built.

    Collections do not write to exempt objects either, so forked processes share their memory. They are unfrozen at
    exit, because C++ libraries report each of their objects that is left over.
    """
    if not gc.get_freeze_count():
        gc.collect()
        atexit.register(gc.unfreeze)
        gc.freeze()
