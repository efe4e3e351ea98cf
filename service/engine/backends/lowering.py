"""Lowering extractors to backends, which can be cancelled."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace

import torch

from fxcore.backends import Backend, Lowered, LoweringFailed, Options
from service.engine.backends.checks import PassFailed, Reference, example_rows
from service.engine.backends.trials import Trials
from service.engine.candidate import Candidate
from service.engine.description import Description
from service.engine.device.threads import in_pool
from service.engine.runtime import Runtime
from service.settings import Settings

log = logging.getLogger("fxserve.upgrades")


class Lowering:
    """Lowers extractors. For one event loop.

    Args:
        device: where extractors run.
        trials: confirms cached artifacts.
        settings: threads, cache, and the photographs for calibration.
    """

    def __init__(self, device: torch.device, trials: Trials, settings: Settings) -> None:
        self._device = device
        self._trials = trials
        self._settings = settings
        self._in_progress: set[threading.Event] = set()
        # (extractor, backend) pairs whose artifact was made again: if that one is no better, it is not damaged.
        self._remade: set[tuple[str, str]] = set()

    def options(self, description: Description) -> Options:
        """Return how to lower an extractor, for a backend."""
        return Options(
            self._device, description.spec.precision, self._settings.compute_threads, self._settings.cache_dir
        )

    async def lower(self, runtime: Runtime, backend: Backend, pool: Executor) -> tuple[Lowered, Reference]:
        """Lower an extractor in ``pool``; also gives the reference to compare with.

        A cached artifact is tried on one photograph: a damaged one may load and compute something else. Cancelling the
        call cancels the lowering.

        Raises:
            LoweringFailed: the backend does not take the model, or the lowering was cancelled.
        """
        description, extractor = runtime.description, runtime.extractor
        cancelled = threading.Event()
        self._in_progress.add(cancelled)

        def work(reuse: bool) -> tuple[Lowered, Reference]:
            if cancelled.is_set():
                raise LoweringFailed(f"lowering to {backend.name} was cancelled", backend=backend.name)
            options = replace(self.options(description), cancelled=cancelled, reuse=reuse)
            rows, calibration = example_rows(description, extractor, self._device, self._settings.calibration_dir)
            two = tuple(torch.cat([a, b]) for a, b in zip(rows[0], rows[1], strict=True))
            lowered = backend.lower(extractor.module, two, replace(options, calibration=calibration))
            return lowered, Reference(extractor.module, rows, description.spec.precision)

        try:
            lowered, reference = await in_pool(pool, work, True)
            artifact = description.id, backend.name
            recalled = getattr(lowered, "recalled", False) and artifact not in self._remade
            if recalled and not await self._confirmed(backend, reference, lowered):
                log.warning("the cached compiled model of extractor %s is wrong and is compiled again", description.id)
                self._remade.add(artifact)
                lowered, reference = await in_pool(pool, work, False)
            return lowered, reference
        finally:
            cancelled.set()
            self._in_progress.discard(cancelled)

    def cancel_all(self) -> None:
        """Cancel all lowerings."""
        for cancelled in self._in_progress:
            cancelled.set()

    async def _confirmed(self, backend: Backend, reference: Reference, lowered: Lowered) -> bool:
        candidate = Candidate(backend.name)
        with suppress(PassFailed):
            await self._trials.compare_one(candidate, reference, lowered)
        return candidate.agrees
