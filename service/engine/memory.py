"""Memory of a process that serves: freed pages go back to the system, and garbage collections stay short."""

from __future__ import annotations

import gc

from fxcore.memory import give_back


def tidy() -> None:
    """Collect garbage once, then exempt what is left from later collections, until this is called again.

    torch and the graphs of models are a million objects that stay. A full collection looks at each and stops every
    thread meanwhile, for 0.3 s: as long as ten batches take.
    """
    gc.unfreeze()
    give_back()
    gc.freeze()


def release() -> None:
    """End the exemption, for the process's end: C++ libraries report at length what is left of theirs on unloading."""
    gc.unfreeze()
