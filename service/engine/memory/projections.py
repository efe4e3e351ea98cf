"""Random projection matrices, shared by all requests with the same row length, size and seed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.projection import matrix_bytes, projection_matrix
from service.engine.placement import BUSY_SECONDS
from service.engine.tasks import SingleFlight
from service.engine.threads import in_pool
from service.problems import AdmissionFull

Key = tuple[int, int, int]
"""Values per row, values per projected row, seed."""

_SHARE = 1 / 4
"""Maximum share of the memory budget for the matrices of one request, and for those being made at a time."""


class Projections:
    """Projection matrices on one device, each created once and kept until it is evicted. For one event loop.

    Args:
        device: the device of the matrices.
        pool: the threads that create them.
        memory_budget: the memory budget, shared with models and extractors.
        make_room: called when a new matrix uses memory; evicts until the budget is kept.
    """

    def __init__(
        self, device: torch.device, pool: Executor, memory_budget: int, make_room: Callable[[], object]
    ) -> None:
        self._device = device
        self._pool = pool
        self._limit = int(_SHARE * memory_budget)
        self._make_room = make_room
        self._matrices = SingleFlight[Key, Tensor]("project")
        self._last_used: dict[Key, float] = {}

    async def get(self, lengths: Collection[int], components: int, seed: int) -> dict[int, Tensor]:
        """Return the matrices for rows of ``lengths`` values, by length.

        Raises:
            BadTensor: together they need too much memory.
            AdmissionFull: too many other matrices are being made.
        """
        keys = [(length, components, seed) for length in lengths]
        size = _bytes(keys)
        if size > self._limit:
            longest = max(length for length, *_ in keys)
            takes, less = f"rows of {longest:,} values needs a matrix", ""
            if len(keys) > 1:
                takes = f"rows of {len(keys)} lengths, up to {longest:,} values, needs matrices"
                less = ", or ask for fewer nodes, or send images of fewer sizes"
            raise BadTensor(
                f"project={components} of {takes} of {size:,} bytes, and at most "
                f"{self._limit:,} are allowed: project to fewer values, or pool first{less}"
            )
        made = {}
        for key in keys:
            if key in self._matrices.made:
                self._last_used[key] = time.monotonic()
            elif (making := self._matrices.making) and key not in making and _bytes([*making, key]) > self._limit:
                raise AdmissionFull(f"{len(making)} other projection matrices are being made", 1.0)
            made[key[0]] = await self._matrices.get(key, partial(self._make, key))
        return made

    def bytes(self) -> int:
        """Return the bytes of the matrices in memory."""
        return _bytes(self._matrices.made)

    def forget_oldest(self, busy: bool) -> bool:
        """Forget the least recently used matrix, and return whether there was one.

        Requests that use it keep it until they end.

        Args:
            busy: whether to forget even one that was used in the last :data:`~service.engine.placement.BUSY_SECONDS`.
        """
        key = min(self._matrices.made, key=self._last_used.__getitem__, default=None)
        if key is None or (not busy and self._last_used[key] > time.monotonic() - BUSY_SECONDS):
            return False
        self._matrices.forget(key)
        del self._last_used[key]
        return True

    async def _make(self, key: Key) -> Tensor:
        matrix = await in_pool(self._pool, lambda: projection_matrix(*key).to(self._device))
        self._last_used[key] = time.monotonic()
        asyncio.get_running_loop().call_soon(self._make_room)
        return matrix


def _bytes(keys: Iterable[Key]) -> int:
    return sum(matrix_bytes(length, components) for length, components, _ in keys)
