"""Compiled models of a process that keep threads and memory between their passes: how many of them there may be."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

FIXED_MODELS = 24
"""Most models of a fixed size. OpenVINO starts two threads for each compiled model that computes on several."""

SCRATCH_BYTES = 512 * 1024**2
"""Most bytes of intermediate values that idle models keep for their next pass."""

IDLE_SECONDS = 10.0
"""A model of a fixed size that was used since then is not dropped for another one, as that would come back for it."""


class Resident:
    """One compiled model.

    Args:
        model: an ``openvino.CompiledModel``.
        drop: for a model of a fixed size, forgets it; None for one that its extractor cannot do without.
    """

    def __init__(self, model: Any, drop: Callable[[], object] | None = None) -> None:
        self.request = model.create_infer_request()
        self.scratch = 0
        self.used = time.monotonic()
        self.drop = drop
        self._model = model

    def release(self) -> None:
        """Free the intermediate values of the last pass."""
        try:
            self._model.release_memory()
        except RuntimeError:  # it computes at this moment
            return
        self.scratch = 0


class Residents:
    """All compiled models of a process, which share one allowance of threads and of intermediate values.

    Models compute one after another on the device worker, so that what all but the latest keep is only there to be
    used again. The least recently used give theirs up first.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Resident] = weakref.WeakSet()
        self._guard = threading.Lock()

    def add(self, resident: Resident) -> None:
        """Count ``resident`` from now on, until it is garbage-collected."""
        with self._guard:
            self._known.add(resident)

    def place(self) -> bool:
        """Whether there may be one more model of a fixed size; one that was idle for long may be dropped for it."""
        with self._guard:
            fixed = [resident for resident in self._known if resident.drop is not None]
            if len(fixed) < FIXED_MODELS:
                return True
            oldest = min(fixed, key=lambda resident: resident.used)
            if time.monotonic() - oldest.used < IDLE_SECONDS:
                return False
            self._known.discard(oldest)
        assert oldest.drop is not None
        oldest.drop()
        return True

    def ran(self, resident: Resident, scratch: int) -> None:
        """Note that ``resident`` ran and keeps ``scratch`` bytes; others give up theirs where it is too much."""
        resident.used = time.monotonic()
        if scratch <= resident.scratch:  # it keeps what its largest pass took
            return
        resident.scratch = scratch
        with self._guard:
            others = sorted(self._known - {resident}, key=lambda other: other.used)
        over = scratch + sum(other.scratch for other in others) - SCRATCH_BYTES
        for other in others:
            if over <= 0:
                break
            over -= other.scratch
            other.release()


RESIDENTS = Residents()
