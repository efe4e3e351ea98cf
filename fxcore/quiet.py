"""Silence the warnings of one thread.

``warnings.catch_warnings`` saves and restores the filters of the whole process: of two threads in it at once, the one
that leaves last brings back what the other had set, for good. Here one filter is shared by all threads, and matches
only in those that asked for it.
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
    """A pattern of messages that matches all of them in a thread that is quiet, and none in others.

    Its method is one of a compiled pattern, so that no other thread runs, and changes the filters, while ``warnings``
    goes through them.
    """

    match = staticmethod(_NONE)
    depth = 0


_MESSAGE = _Message()
_FILTER: Any = ("ignore", _MESSAGE, Warning, None, 0)
_LOCK = threading.Lock()
_quiet_threads = 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence all warnings of the calling thread. Other threads keep theirs; may be nested."""
    global _quiet_threads
    with _LOCK:
        _quiet_threads += 1
        if _FILTER not in _filters():  # ``catch_warnings`` elsewhere may have taken it out
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
                with contextlib.suppress(ValueError):  # it is not there any more
                    while True:
                        _filters().remove(_FILTER)


def _filters() -> list[Any]:
    """Return the list that ``warnings`` goes through; ``catch_warnings`` replaces it."""
    filters: Any = warnings.filters
    return filters  # type: ignore[no-any-return]
