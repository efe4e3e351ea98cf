"""Memory accounting: each storage is counted once, however many extractors share it."""

from __future__ import annotations

from collections.abc import Mapping


class Ledger:
    """Total bytes of the storages in memory. For one event loop.

    Attributes:
        bytes: bytes of all storages that were added and not removed.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._held: dict[int, tuple[int, int]] = {}  # address → bytes, number of holders

    def add(self, storages: Mapping[int, int]) -> None:
        """Count ``storages``, bytes by address, for one more holder."""
        for at, size in storages.items():
            known, holders = self._held.get(at, (size, 0))
            self._held[at] = known, holders + 1
            self.bytes += size if holders == 0 else 0

    def remove(self, storages: Mapping[int, int]) -> None:
        """Count ``storages``, added before, for one holder less."""
        for at in storages:
            known, holders = self._held.pop(at)
            if holders > 1:
                self._held[at] = known, holders - 1
            else:
                self.bytes -= known
