"""Memory of a process that serves: freed pages go back to the system, and the collector has little to look through."""

from __future__ import annotations

import gc

from fxcore.memory import give_back


def tidy() -> None:
    """Collect everything once, then keep what is left out of later collections until this is called again.

    torch and the graphs of models are a million objects that stay. A full collection looks at each and stops every
    thread meanwhile, for 0.3 s: as long as ten batches take.
    """
    gc.unfreeze()
    give_back()
    gc.freeze()


def release() -> None:
    """Have the collector look at everything again, for the process's end: libraries in C++ tell at length of what is
    left of theirs when they are unloaded."""
    gc.unfreeze()
