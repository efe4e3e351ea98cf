"""The policy of Python's garbage collector in this process.

What the service imports is about 400,000 objects that stay. A full collection visits each of them, and stops all
threads for 0.2 s meanwhile, so they are exempt. What is built later, a graph of some 10,000 objects for each extractor,
is collected as Python does, and once more after each deletion.

Nothing heavy is imported here, as commands begin with this module.
"""

from __future__ import annotations

import atexit
import gc

_THRESHOLD = 10_000
"""New objects after which a collection starts; Python's default is 700."""


def collect_rarely() -> None:
    """Raise the collector's threshold.

    Called first of all, it shortens the start: imports make objects that stay, and collections meanwhile find nothing.
    """
    gc.set_threshold(_THRESHOLD, *gc.get_threshold()[1:])


def exempt_imports() -> None:
    """Exempt all objects that there are from collections, until the process ends; once, before anything is built.

    What is exempt is not written to either, so that forked processes share it. C++ libraries report each of their
    objects that is left at the end.
    """
    if not gc.get_freeze_count():
        gc.collect()
        atexit.register(gc.unfreeze)
        gc.freeze()
