"""Silence the warnings of one thread.

``warnings.catch_warnings`` saves and restores the filters of the whole process: if two threads use it at once, the one
that leaves last permanently restores the filters that the other had set. Here, all threads share one filter, which
matches only in threads that are quiet.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_ANY, _NONE = re.compile("").match, re.compile(r"(?!)").match


class _Message(threading.local):
    """A message pattern that matches all messages in a quiet thread, and none in others.

    ``match`` is a method of a compiled pattern, so that no other thread can run, and change the filters, while
    ``warnings`` iterates over them.
    """

    match = staticmethod(_NONE)
    depth = 0


_MESSAGE = _Message()
_FILTER: Any = ("ignore", _MESSAGE, Warning, None, 0)
_LOCK = threading.Lock()
_quiet_threads = 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence all warnings of the calling thread only. May be nested."""
    global _quiet_threads
    with _LOCK:
        _quiet_threads += 1
        if _FILTER not in _filters():  # ``catch_warnings`` elsewhere may have removed it
            _filters().insert(0, _FILTER)
    _MESSAGE.depth += 1
    _MESSAGE.match = _ANY
    try:
        yield
    finally:
        _MESSAGE.depth -= 1
        if not _MESSAGE.depth:
            _MESSAGE.match = _NONE
        with _LOCK:
            _quiet_threads -= 1
            if not _quiet_threads:
                with contextlib.suppress(ValueError):  # raised once no copy is left
                    while True:
                        _filters().remove(_FILTER)


def _filters() -> list[Any]:
    """Return the current list of filters, which ``catch_warnings`` replaces."""
    filters: Any = warnings.filters
    return filters  # type: ignore[no-any-return]
