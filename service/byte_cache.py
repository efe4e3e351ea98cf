"""An LRU cache bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """Maps keys to values and evicts the least recently used ones above ``limit`` bytes. Thread-safe.

    Args:
        limit: maximum bytes; a single value larger than this is not cached.
        size: returns the bytes of a value.
    """

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self._limit = limit
        self._size = size
        self._guard = threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()
        self.bytes = 0

    def get(self, key: K) -> V | None:
        """Look up ``key`` and mark it as recently used."""
        with self._guard:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Add or replace a value and mark it as recently used; one over the limit is not added."""
        size = self._size(value)
        with self._guard:
            previous = self._values.pop(key, None)
            self.bytes -= 0 if previous is None else self._size(previous)
            if size > self._limit:
                return
            self.bytes += size
            self._values[key] = value
            while self.bytes > self._limit:
                self.bytes -= self._size(self._values.popitem(last=False)[1])

    def __contains__(self, key: K) -> bool:
        return key in self._values
