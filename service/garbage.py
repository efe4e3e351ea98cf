"""When Python's collector looks for garbage, and at what: the policy of the whole process.

torch and the graphs of models are a million objects that stay. A full collection looks at each and stops every thread
meanwhile, for 0.3 s: as long as ten batches take. So collections are rare, and what stays is exempt from them.

Nothing heavy is imported here at once, as commands begin with it.
"""

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


def exempt() -> None:
    """Exempt what was made since the last call, as a built extractor, from later collections.

    What is garbage already is collected first: exempt, it would stay until the next :func:`tidy`. That looks at what is
    new only.
    """
    gc.collect()
    gc.freeze()


def tidy() -> None:
    """Collect all garbage, what was exempt included, give free memory back to the system, and exempt what is left."""
    from fxcore.memory import give_back

    gc.unfreeze()
    give_back()
    gc.freeze()


def release() -> None:
    """End the exemption, for the process's end: C++ libraries report at length what is left of theirs on unloading."""
    gc.unfreeze()
