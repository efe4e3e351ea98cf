"""The names that extractors are addressed by beside their ids."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import chain, islice

MOST_NAMES = 32
"""Names of one extractor, so that naming it again and again takes no memory: more than clients that share it need."""

_NAME_BYTES = 300
"""A name of no letters, in two dictionaries."""

COMPARED = 256
"""Names and ids that a wrong one is compared with, which takes the event loop milliseconds for names of 20 letters."""


class Names:
    """Which extractor a name stands for. An id keeps the last :data:`MOST_NAMES` that it was given."""

    def __init__(self) -> None:
        # In both the name that was given last is the last.
        self._ids: dict[str, str] = {}
        self._names: dict[str, dict[str, None]] = {}

    def id(self, name: str) -> str | None:
        """The id that ``name`` stands for."""
        return self._ids.get(name)

    def last(self, id: str) -> str | None:
        """The name that ``id`` was given last, of those that it has."""
        return next(reversed(self._names.get(id, {})), None)

    def give(self, name: str, id: str) -> None:
        """Make ``name`` the last one of ``id``, whichever had it before."""
        self.free(name)
        self._ids[name] = id
        own = self._names.setdefault(id, {})
        own[name] = None
        if len(own) > MOST_NAMES:
            self.free(next(iter(own)))

    def forget(self, id: str) -> None:
        """Free all names of ``id``."""
        for name in self._names.pop(id, ()):
            del self._ids[name]

    def bytes(self, id: str) -> int:
        """About what the names of ``id`` take."""
        return sum(_NAME_BYTES + 2 * len(name) for name in self._names.get(id, ()))

    def near(self, wrong: str, ids: Iterable[str]) -> list[str]:
        """At most three that ``wrong`` may be meant to be, the nearest first.

        Only :data:`COMPARED` are looked at: the names that were given last, and then of ``ids`` the first.
        """
        return get_close_matches(wrong[:128], islice(chain(reversed(self._ids), ids), COMPARED), n=3, cutoff=0.5)

    def free(self, name: str) -> None:
        """Take ``name`` from whichever has it."""
        id = self._ids.pop(name, None)
        if id is not None:
            del self._names[id][name]
            if not self._names[id]:
                del self._names[id]
