"""Whether the shared store can be read and written, as its last operations found it."""

from __future__ import annotations

import asyncio
import logging

from service.engine.extractors.objects import StoreError
from service.observability.metrics import Metrics

log = logging.getLogger("fxserve.store")

TIMEOUT_SECONDS = 5.0
"""After which the store is taken not to answer."""


class StoreHealth:
    """What is wrong with a store, for ``/readyz``, the metrics and those who want to use it. For one event loop.

    Args:
        url: of the store.
        metrics: where its state and its errors are counted.

    Attributes:
        unavailable: why the store cannot be read; None if it can.
        unwritable: why the last write failed; None if it did not.
        damaged: id or name → what is wrong with its object.
    """

    def __init__(self, url: str, metrics: Metrics) -> None:
        self._url = url
        self._up = metrics.store_up
        self._errors = metrics.store_errors
        self._opened = False
        self.unavailable: str | None = "the store of extractors has not been read yet"
        self.unwritable: str | None = None
        self.damaged: dict[str, str] = {}

    @property
    def never_opened(self) -> str | None:
        """Why the store has not been read even once; None if it has."""
        return None if self._opened else self.unavailable

    def error(self) -> str | None:
        """What is wrong with the store now. Extractors in memory are served all the same."""
        return self.unavailable or self.unwritable or next(iter(self.damaged.values()), None)

    def in_time(self) -> asyncio.Timeout:
        """Return the context of what the store has :data:`TIMEOUT_SECONDS` for."""
        return asyncio.timeout(TIMEOUT_SECONDS)

    def failed(self, operation: str, error: StoreError | TimeoutError) -> str:
        """Count ``error``, and describe it."""
        self._errors.labels(operation).inc()
        return str(error) or f"the store of extractors {self._url} did not answer within {TIMEOUT_SECONDS:.0f} s"

    def lost(self, reason: str) -> None:
        """Take the store to be unavailable."""
        if self.unavailable is None:
            log.error("%s; what is in memory is served", reason)
        self.unavailable = reason
        self._up.set(0)

    def found(self) -> None:
        """Take the store to be available."""
        if self._opened and self.unavailable is not None:
            log.warning("the store of extractors %s is back", self._url)
        self._opened = True
        self.unavailable = None
        self._up.set(1)
