"""How much work may be in the server at a time.

A request enters before any of it is decoded: first by count, then, once its image headers are read, with the bytes it
will decode to and answer with. What does not fit is refused at once, and told when to come back.
"""

from __future__ import annotations

import math
import time
from collections import deque
from types import TracebackType

from service.engine.errors import AdmissionFull, RequestTooLarge

_WINDOW = 30.0
"""Seconds over which the drain rate is measured."""

_SHORTEST, _LONGEST = 1.0, 60.0
"""Bounds on the seconds that a refused client is told to wait."""


class Admission:
    """Counts requests and their bytes. For one event loop: no locks.

    Args:
        max_requests: most requests at a time.
        max_bytes: most bytes that the admitted requests may claim together.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.requests = 0
        self.bytes = 0
        self._departures: deque[float] = deque(maxlen=256)

    def enter(self) -> Ticket:
        """Take a place.

        Raises:
            AdmissionFull: there is none.
        """
        if self.requests >= self.max_requests:
            raise self._full(f"{self.requests} requests are being worked on, as many as are allowed at a time")
        self.requests += 1
        return Ticket(self)

    def retry_after(self) -> float:
        """Seconds until what is in now will have left, going by how fast requests left lately."""
        now = time.monotonic()
        while self._departures and now - self._departures[0] > _WINDOW:
            self._departures.popleft()
        if not self._departures:
            return _SHORTEST
        rate = len(self._departures) / max(now - self._departures[0], 1e-3)
        return float(math.ceil(min(max(self.requests / rate, _SHORTEST), _LONGEST)))

    def _full(self, why: str) -> AdmissionFull:
        seconds = self.retry_after()
        return AdmissionFull(f"{why}; try again in {seconds:.0f} s", retry_after=seconds)

    def _claim(self, amount: int) -> None:
        if amount > self.max_bytes:
            raise RequestTooLarge(amount, self.max_bytes)
        if self.bytes + amount > self.max_bytes:
            raise self._full(
                f"the requests being worked on need {self.bytes:,} bytes, this one {amount:,}, and the limit is "
                f"{self.max_bytes:,}"
            )
        self.bytes += amount

    def _leave(self, amount: int) -> None:
        self.requests -= 1
        self.bytes -= amount
        if amount:  # one that was refused says nothing about how fast work gets done
            self._departures.append(time.monotonic())


class Ticket:
    """A request's place; use it as a context manager so that the place is given back."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._bytes = 0

    def claim(self, amount: int) -> None:
        """Count ``amount`` bytes to this request until it leaves.

        Raises:
            AdmissionFull: they do not fit beside what others hold.
            RequestTooLarge: they would not fit if this request were alone.
        """
        self._admission._claim(amount)
        self._bytes += amount

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission._leave(self._bytes)
