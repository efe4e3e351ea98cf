"""Random projection matrices, shared by all requests with the same row length, size and seed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.projection import matrix_bytes, projection_matrix
from service.engine.placement import BUSY_SECONDS
from service.engine.tasks import background
from service.engine.threads import in_pool

Key = tuple[int, int, int]
"""Values per row, values per projected row, seed."""

_SHARE = 1 / 4
"""Maximum share of the memory budget for the matrices of one request."""


class Projections:
    """Projection matrices on one device, each created once and kept until it is evicted. For one event loop.

    Args:
        device: the device of the matrices.
        pool: the threads that create them.
        memory_budget: the memory budget, shared with models and extractors.

    Attributes:
        on_made: called when a new matrix uses memory.
    """

    def __init__(self, device: torch.device, pool: Executor, memory_budget: int) -> None:
        self.on_made: Callable[[], None] = lambda: None
        self._device = device
        self._pool = pool
        self._memory_budget = memory_budget
        self._making: dict[Key, asyncio.Task[Tensor]] = {}
        self._last_used: dict[Key, float] = {}

    async def get(self, lengths: Collection[int], components: int, seed: int) -> dict[int, Tensor]:
        """Return the matrices for rows of ``lengths`` values, by length.

        Raises:
            BadTensor: together they need too much memory.
        """
        keys = [(length, components, seed) for length in lengths]
        size = sum(matrix_bytes(length, components) for length, *_ in keys)
        if size > _SHARE * self._memory_budget:
            longest = max(length for length, *_ in keys)
            takes, less = f"rows of {longest:,} values needs a matrix", ""
            if len(keys) > 1:
                takes = f"rows of {len(keys)} lengths, up to {longest:,} values, needs matrices"
                less = ", or ask for fewer nodes, or send images of fewer sizes"
            raise BadTensor(
                f"project={components} of {takes} of {size:,} bytes, and at most "
                f"{int(_SHARE * self._memory_budget):,} are allowed: project to fewer values, or pool first{less}"
            )
        made = {}
        for key in keys:
            task = self._making.get(key)
            if task is None:
                task = self._making[key] = background(self._make(key), "project")
            self._last_used[key] = time.monotonic()
            made[key[0]] = await asyncio.shield(task)
        return made

    def bytes(self) -> int:
        """Return the bytes of the matrices in memory."""
        return sum(matrix_bytes(length, components) for length, components, _ in self._made())

    def evict(self, busy: bool) -> bool:
        """Drop the least recently used matrix, and return whether there was one.

        Requests that use it keep it until they end.

        Args:
            busy: whether to drop even one that was used in the last :data:`~service.engine.placement.BUSY_SECONDS`.
        """
        key = min(self._made(), key=self._last_used.__getitem__, default=None)
        if key is None or (not busy and self._last_used[key] > time.monotonic() - BUSY_SECONDS):
            return False
        del self._making[key], self._last_used[key]
        return True

    def _made(self) -> list[Key]:
        return [key for key, task in self._making.items() if task.done()]

    async def _make(self, key: Key) -> Tensor:
        try:
            matrix = await in_pool(self._pool, self._matrix, *key)
        except BaseException:
            del self._making[key], self._last_used[key]
            raise
        asyncio.get_running_loop().call_soon(self.on_made)
        return matrix

    def _matrix(self, length: int, components: int, seed: int) -> Tensor:
        return projection_matrix(length, components, seed).to(self._device)
