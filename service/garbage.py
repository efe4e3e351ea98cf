"""The policy of Python's garbage collector in this process.

torch and the graphs of models are about a million objects that stay. A full collection visits each of them and stops
all threads meanwhile, so what stays is exempt from collections.

Nothing heavy is imported here, as commands begin with this module.
"""

from __future__ import annotations

import gc

_THRESHOLD = 10_000
"""New objects after which a collection starts; Python's default is 700."""


def collect_rarely() -> None:
    """Raise the collector's threshold.

    Called first of all, it shortens the start: imports make objects that stay, and collections meanwhile find nothing.
    """
    gc.set_threshold(_THRESHOLD, *gc.get_threshold()[1:])


def exempt() -> None:
    """Exempt what was made since the last call, as a built extractor, from later collections.

    Garbage among it is collected first, or it would stay until the next :func:`tidy`. This collection visits only what
    is not exempt yet.
    """
    gc.collect()
    gc.freeze()


def tidy() -> None:
    """Collect all garbage, what was exempt included, return free memory to the system, and exempt what is left."""
    from fxcore.memory import give_back

    gc.unfreeze()
    give_back()
    gc.freeze()


def release() -> None:
    """End the exemption, at the process's end: C++ libraries report each of their objects that is left then."""
    gc.unfreeze()
