"""How often Python's collector looks for garbage. Nothing heavy is imported here, as commands begin with it."""

from __future__ import annotations

import gc

_YOUNG = 10_000
"""New objects after which a collection starts; Python's default is 700. A request makes and frees a hundred: with 32 of
them under way there were 70 collections a second, which held the GIL for 3 % of the time and found nothing. With 5,000
there are none."""


def collect_rarely() -> None:
    """Raise the threshold above the number of objects that come and go with requests.

    Called first of all, it also shortens the start: importing torch and torchvision makes a million objects that stay,
    and collections among them take a fifth of the five seconds that all imports take.
    """
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
