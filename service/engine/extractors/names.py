"""Names of extractors, by which clients can address them in addition to ids."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import chain, islice

MAX_NAMES = 32
"""Maximum names per extractor, so that renaming it repeatedly does not use up memory."""

_NAME_BYTES = 300
"""Approximate bytes of a name in the two dictionaries, without its characters."""

_SIMILAR = 0.6
"""Minimum similarity of a suggestion; random ids rarely have it."""

COMPARED = 256
"""Maximum names and ids that an unknown one is compared with; this takes milliseconds of event loop time."""


class Names:
    """Maps names to ids of extractors. An id keeps the last :data:`MAX_NAMES` names it was given."""

    def __init__(self) -> None:
        # Both in the order the names were given.
        self._ids: dict[str, str] = {}
        self._names: dict[str, dict[str, None]] = {}

    def id(self, name: str) -> str | None:
        """Return the id that has ``name``."""
        return self._ids.get(name)

    def last(self, id: str) -> str | None:
        """Return the latest name that ``id`` still has."""
        return next(reversed(self._names.get(id, {})), None)

    def give(self, name: str, id: str) -> None:
        """Give ``name`` to ``id``, taking it from any other id."""
        self.free(name)
        self._ids[name] = id
        own = self._names.setdefault(id, {})
        own[name] = None
        if len(own) > MAX_NAMES:
            self.free(next(iter(own)))

    def forget(self, id: str) -> None:
        """Free all names of ``id``."""
        for name in self._names.pop(id, ()):
            del self._ids[name]

    def bytes(self, id: str) -> int:
        """Return the approximate bytes of the names of ``id``."""
        return sum(_NAME_BYTES + 2 * len(name) for name in self._names.get(id, ()))

    def near(self, wrong: str, ids: Iterable[str]) -> list[str]:
        """Return at most three suggestions for ``wrong``, the closest first.

        At most :data:`COMPARED` candidates are compared: the newest names, then the first of ``ids``.
        """
        return get_close_matches(wrong[:128], islice(chain(reversed(self._ids), ids), COMPARED), cutoff=_SIMILAR)

    def free(self, name: str) -> None:
        """Free ``name``."""
        id = self._ids.pop(name, None)
        if id is not None:
            del self._names[id][name]
            if not self._names[id]:
                del self._names[id]
