"""Limit the threads and memory that the compiled models of a process hold between passes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

FIXED_MODELS = 14
"""Maximum number of fixed-shape models. OpenVINO starts two threads for each compiled model that runs on several
threads; with the service's usual 16 extractors that is under 64 threads in all."""

SCRATCH_BYTES = 512 * 1024**2
"""Maximum bytes of intermediate values that idle models keep for their next pass."""

IDLE_SECONDS = 10.0
"""Seconds that a fixed-shape model must be idle before another may replace it, so that models in use stay."""


class Resident:
    """A compiled model that stays in memory between passes.

    Args:
        model: an ``openvino.CompiledModel``.
        drop: removes a fixed-shape model from its extractor; None for a model that the extractor needs.

    Attributes:
        request: the model's inference request.
        scratch: bytes of intermediate values that the model holds.
        used: ``time.monotonic()`` of the last pass.
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
        except RuntimeError:  # the model is running
            return
        self.scratch = 0


class Residents:
    """All compiled models of a process, which share the limits. Thread-safe.

    Models run one after another, so all models but the running one keep their intermediate values only for reuse. Those
    of the least recently used model are freed first.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Resident] = weakref.WeakSet()
        self._guard = threading.Lock()

    def add(self, resident: Resident) -> None:
        """Count ``resident`` until it is garbage-collected."""
        with self._guard:
            self._known.add(resident)

    def reserve_fixed(self) -> bool:
        """Return whether one more fixed-shape model is allowed, dropping one that was idle for long if necessary."""
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
        """Record that ``resident`` ran and holds ``scratch`` bytes; free those of others if the total is too large."""
        resident.used = time.monotonic()
        if scratch <= resident.scratch:  # a model holds the memory of its largest pass
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
