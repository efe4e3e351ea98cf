"""The scheduled retries of refused requests, by client."""

from __future__ import annotations

import heapq
import time


class Returns:
    """Counts pending retries, so that refused clients come back one after another.

    All of a client's own pending retries delay its next one; of every other client, only one counts. A client that
    ignores ``Retry-After`` and is refused repeatedly therefore delays others by at most one request.

    Args:
        max_returns: maximum retries kept per client, and maximum number of clients; the earliest are dropped first.
    """

    def __init__(self, max_returns: int) -> None:
        self._max_returns = max_returns
        self._of: dict[str, list[float]] = {}  # client → heap of times
        self._clients: list[tuple[float, str]] = []  # heap of clients, by the time of their next check

    def before(self, client: str) -> int:
        """Count the retries that come before another one of ``client``."""
        now = time.monotonic()
        while self._clients and self._clients[0][0] < now:
            _, known = heapq.heappop(self._clients)
            _drop(self._of[known], now)
            if self._of[known]:
                heapq.heappush(self._clients, (max(self._of[known]), known))
            else:
                del self._of[known]
        own = self._of.get(client)
        if own is None:
            return len(self._of)
        _drop(own, now)
        return len(self._of) - 1 + len(own)

    def add(self, client: str, at: float) -> None:
        """Schedule a retry of ``client`` at ``at``, on the clock of ``time.monotonic()``."""
        if client not in self._of:
            if len(self._of) == self._max_returns:
                del self._of[heapq.heappop(self._clients)[1]]
            self._of[client] = []
            heapq.heappush(self._clients, (at, client))
        own = self._of[client]
        if len(own) < self._max_returns:
            heapq.heappush(own, at)
        else:
            heapq.heappushpop(own, at)


def _drop(times: list[float], now: float) -> None:
    while times and times[0] < now:
        heapq.heappop(times)
