"""The measured speed of a model, and the seconds that it predicts for an input."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from service.problems import DeadlineExceeded

LONGEST_SECONDS = 5.0
"""Maximum predicted seconds of a batch of several rows, so that a batch of a slow model does not look like a hang."""

_HOPELESS = 2.0
"""An input is refused if its prediction is this multiple of the time left: predictions are that uncertain."""

_EXTRAPOLATED = 1000
"""Maximum FLOPs of a prediction, as a multiple of the largest row measured: small rows say little about large ones."""

_FIRST_BATCHES = 2
"""Number of batches that may include compiling and first memory accesses."""

_SLOW_SECONDS = 30.0
"""Seconds of a batch in which those no longer matter."""

_VALID_SECONDS = 600.0
"""Seconds for which a batch vouches for the speed. After that a row is tried again, whatever slowed the last one down.
"""


class Pace:
    """The speed of one model in one precision on the device. The device worker adds batches; any thread may read it.

    The fastest batch counts, so predictions are rather too short than too long.
    """

    def __init__(self) -> None:
        self._batches = 0
        self._last = -math.inf
        self._largest = 0
        self._seconds_per_flop = math.inf

    def add(self, seconds: float, row_flops: int, rows: int) -> None:
        """Take a batch into account."""
        self._batches += 1
        if row_flops and (self._batches > _FIRST_BATCHES or seconds > _SLOW_SECONDS):
            if 4 * row_flops >= self._largest:  # small rows do not vouch for large ones
                self._last = time.monotonic()
            self._seconds_per_flop = min(self._seconds_per_flop, seconds / (row_flops * rows))
            self._largest = max(self._largest, row_flops)

    def check(self, row_flops: int, left: float, shapes: Sequence[Sequence[int]]) -> None:
        """Refuse a row that would keep the device busy long after its deadline.

        If nothing comparable was measured lately, no row is refused.

        Args:
            row_flops: its FLOPs.
            left: seconds until the deadline.
            shapes: shapes of its inputs.

        Raises:
            DeadlineExceeded: it would take several times as long as ``left``, and as :data:`LONGEST_SECONDS`.
        """
        if row_flops > _EXTRAPOLATED * self._largest or time.monotonic() > self._last + _VALID_SECONDS:
            return
        if self._batches <= _FIRST_BATCHES and row_flops <= self._largest:  # only the first of a kind may be slow
            return
        seconds = row_flops * self._seconds_per_flop
        if seconds > _HOPELESS * max(left, LONGEST_SECONDS):
            shown = ", ".join(" x ".join(map(str, dims)) for dims in shapes)
            raise DeadlineExceeded(
                f"computing an input of {shown} would take about {seconds:.0f} s on this server, and the deadline is "
                f"in {max(0.0, left):.0f} s: ask for a smaller image_size, send a smaller input, or raise "
                "X-Request-Timeout or FXSERVE_REQUEST_TIMEOUT, which limits it"
            )
