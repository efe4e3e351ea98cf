"""The policy of Python's garbage collector in this process.

torch and the graphs of models are about a million objects that stay. A full collection visits each of them and stops
all threads meanwhile, so what there is once the service has started is exempt from collections. What is built later is
collected as Python does, and once more after each deletion.

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


def exempt() -> None:
    """Collect garbage, and exempt what is left from later collections until the process ends.

    C++ libraries report each of their objects that is left then.
    """
    collect()
    if not gc.get_freeze_count():
        atexit.register(gc.unfreeze)
    gc.freeze()


def collect() -> None:
    """Collect garbage, what is exempt included, and return free memory to the system.

    All that is left is exempt then, if anything was: it would be garbage that is never found, were it frozen for good.
    """
    from fxcore.memory import give_back

    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    give_back()
    if frozen:
        gc.freeze()
