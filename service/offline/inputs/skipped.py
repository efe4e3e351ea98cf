"""Counting of files that a run skips because they are not images."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from service.offline.folder import is_url

_MAX_KINDS = 1000
"""Maximum kinds that are counted separately: a folder may have millions of files with distinct suffixes or names."""

_SHOWN = 5
_LONGEST = 40


class Skipped:
    """Counts skipped files by suffix, or by name if they have none.

    Args:
        out: path or URL of the run's output folder, which may be among the images; its files are not counted.

    >>> skipped = Skipped()
    >>> for path in ("a/1.txt", "a/2.TXT", "a/notes"):
    ...     skipped.add(path)
    >>> str(skipped)
    'skipped 3 files that are not images: 2 .txt, notes'
    """

    def __init__(self, out: str | Path | None = None) -> None:
        self.count = 0
        self._out = None if out is None else os.path.join(str(out) if is_url(str(out)) else os.path.abspath(out), "")
        self._kinds: Counter[str] = Counter()

    def add(self, path: str) -> None:
        """Count a file, by its absolute path or URL."""
        if self._out is not None and path.startswith(self._out):
            return
        self.count += 1
        name = os.path.basename(path)
        kind = os.path.splitext(name)[1].lower() or name
        if kind in self._kinds or len(self._kinds) < _MAX_KINDS:
            self._kinds[kind] += 1

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        shown = sorted(self._kinds.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
        kinds = [_shortened(kind) if count == 1 else f"{count} {_shortened(kind)}" for kind, count in shown]
        if others := self.count - sum(count for _, count in shown):
            kinds.append(f"{others} other{'s' * (others != 1)}")
        are = "file that is not an image" if self.count == 1 else "files that are not images"
        return f"skipped {self.count} {are}: {', '.join(kinds)}"


def _shortened(kind: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in kind)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
