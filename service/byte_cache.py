"""An LRU cache bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """Values by key, of which the least recently used are dropped over ``limit`` bytes. For any thread.

    Args:
        limit: most bytes; a value that is larger by itself is not kept.
        size: the bytes of a value.
    """

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self._limit = limit
        self._size = size
        self._guard = threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()
        self.bytes = 0

    def get(self, key: K) -> V | None:
        """The value of ``key``, which counts as used now."""
        with self._guard:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Keep ``value``, which counts as used now."""
        with self._guard:
            before = self._values.pop(key, None)
            self.bytes += self._size(value) - (0 if before is None else self._size(before))
            self._values[key] = value
            while self.bytes > self._limit:
                self.bytes -= self._size(self._values.popitem(last=False)[1])

    def drop(self, key: K) -> None:
        """Keep nothing under ``key``."""
        with self._guard:
            value = self._values.pop(key, None)
            self.bytes -= 0 if value is None else self._size(value)

    def clear(self) -> None:
        """Drop all values."""
        with self._guard:
            self._values.clear()
            self.bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._values
