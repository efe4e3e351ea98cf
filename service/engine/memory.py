"""Memory of a process that serves: freed pages go back to the system, and the collector has little to look through."""

from __future__ import annotations

import gc

from fxcore.memory import give_back

_YOUNG = 10_000
"""New objects that the collector waits for; 700 is usual. A request makes and frees a hundred, so with 32 of them on
their way it looked through what they were using 70 times a second, for 3 % of the time in which no other thread could
go on, and never found a thing to free. With 5,000 it does not look at all."""


def collect_rarely() -> None:
    """Have the collector wait for as many new objects as do not come and go with requests."""
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


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
