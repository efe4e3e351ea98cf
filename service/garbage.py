"""How often Python's collector looks for garbage. Nothing heavy is imported here, as commands begin with it."""

from __future__ import annotations

import gc

_YOUNG = 10_000
"""New objects that the collector waits for; 700 is usual. A request makes and frees a hundred, so with 32 of them on
their way it looked through what they were using 70 times a second, for 3 % of the time in which no other thread could
go on, and never found a thing to free. With 5,000 it does not look at all."""


def collect_rarely() -> None:
    """Have the collector wait for as many new objects as do not come and go with requests.

    Called first of all, it also makes a start shorter: importing torch and torchvision makes a million objects that
    stay, which are looked through again and again, for a fifth of the five seconds that all imports take.
    """
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
