"""Answer at once, then get faster: which backend runs an extractor, and how another takes over.

``backend=auto`` starts on eager. Once the extractor is used, a faster backend is lowered beside it, compared with eager
float32 on photographs, and timed; it takes over between two batches if it agrees and is faster, and the next
start remembers that (:mod:`service.engine.backends.verdicts`). A backend that was asked for by name is lowered and
compared before the first request, and used or refused.

Lowering runs in child processes, one at a time; comparing and timing run on the device worker, when no request waits
(:mod:`service.engine.backends.trials`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any

import torch

from fxcore.backends import Backend, Lowered, LoweringFailed, faster_than_eager
from fxcore.backends.eager import EagerInt8
from fxcore.extractor import Extractor
from service.engine.backends.checks import PassFailed, Reference, check_photographs, report
from service.engine.backends.choice import chosen_backend, has_copy, has_place
from service.engine.backends.fallback import OneSize
from service.engine.backends.int8_advice import int8_refusal, shown, simulation
from service.engine.backends.lowering import Lowering
from service.engine.backends.search import Search
from service.engine.backends.trials import Trials
from service.engine.backends.verdicts import Verdicts
from service.engine.candidate import Candidate, CandidateState
from service.engine.device.queue import Queue
from service.engine.device.threads import Pool, compute_on, in_pool
from service.engine.errors import is_shortage, shortage
from service.engine.record import ExtractorRecord
from service.engine.tasks import background
from service.garbage import tidy
from service.problems import BackendRefused, NotReady, Problem
from service.settings import Settings

log = logging.getLogger("fxserve.upgrades")

WORTH_A_COPY = 16
"""Images that an extractor answers before it gets a lowered copy of weights that another extractor has lowered
already."""

WORTH_SECONDS = 30.0
"""Seconds of computing on eager from which a search pays for a single run. On two cores it takes 10 seconds for
mobilenet_v3_small and 40 for swin_t, and what it finds takes a third to three quarters of the time."""

_FULL_SECONDS = 1.0
"""Seconds after which it is looked again for a place for one more compiled extractor."""


class Upgrades:
    """Chooses what runs each extractor. For one event loop.

    Args:
        device: where extractors run.
        queue: the device worker's.
        settings: threads, cache, and whether ``auto`` looks for something faster.
        usual: compiled extractors beside which none is added while all are in use.
    """

    def __init__(self, device: torch.device, queue: Queue, settings: Settings, usual: int) -> None:
        self._device = device
        self._settings = settings
        self._verdicts = Verdicts(settings)
        self._trials = Trials(queue, settings.max_batch)
        self._lowering = Lowering(device, self._trials, settings)
        # Two pools: builds that requests wait for do not queue behind background work.
        self._foreground = Pool(1, "fxserve-lower", compute_on, device, 1)
        self._background = Pool(1, "fxserve-improve", compute_on, device, 1)
        # Called when another backend may have taken over, which takes memory.
        self.on_upgrade: Callable[[], object] = lambda: None
        self._lowered: weakref.WeakSet[ExtractorRecord] = weakref.WeakSet()  # and those that are being lowered
        self._usual = usual
        self._full_until = 0.0  # on the clock of time.monotonic(): requests do not count the compiled ones each time
        self._checks: set[asyncio.Task[Candidate]] = set()

    def start(self) -> None:
        """Start the threads."""
        self._foreground.start()
        self._background.start()

    def close(self) -> None:
        """Cancel all lowerings and searches."""
        self._lowering.cancel_all()
        for record in self._lowered:
            if record.upgrade is not None:
                record.upgrade.cancel()
        for check in self._checks:
            check.cancel()
        for pool in (self._foreground, self._background):
            pool.shutdown(wait=False, cancel_futures=True)

    def forget(self, record: ExtractorRecord) -> None:
        """Cancel the lowering of ``record``, which is deleted or unloaded, unless requests wait for it.

        An unused lowering would keep others waiting and memory in use.
        """
        record.gone = True
        if record.check is not None:
            record.check.cancel()
        searching = record.upgrade is not None and not record.upgrade.done()
        if searching or not record.users:
            self._cancel(record)
        if searching:
            self._background.submit(tidy)  # runs once the lowering in that pool has released it

    async def first(
        self, record: ExtractorRecord, extractor: Extractor, original: Callable[..., Any], pool: Executor
    ) -> None:
        """Set what runs the first request of ``record``.

        Args:
            original: computes what the model itself does, as ``extractor.module`` did before any transform.
            pool: the threads that prepare eager, which is as quick as building an extractor.

        Raises:
            BackendRefused: the backend that the spec names cannot lower the model, or is too far from eager.
        """
        backend = chosen_backend(record.spec, self._device)
        if backend.name == "eager" and record.spec.precision != "int8":
            own = Candidate("eager", CandidateState.SERVING)
            record.backend, record.checks = "eager", report(record, own, [own])
            record.run = run = await in_pool(pool, backend.lower, extractor.module, (), self._lowering.options(record))
            self._begin(record, self._measured(record, original, run, own))
        else:
            await self._lowered_first(record, extractor, backend)

    async def _lowered_first(self, record: ExtractorRecord, extractor: Extractor, backend: Backend) -> None:
        """Lower before the first request, and compare: the backend serves, or the spec is refused."""
        spec = record.spec
        candidate = Candidate(backend.name)
        instead = f"ask for {'precision=float32' if spec.backend == 'auto' else 'backend=auto, or another precision'}"
        try:
            lowered, reference = await self._lowering.lower(record, extractor, backend, self._foreground)
            await self._trials.compare(candidate, reference, lowered)
            await self._trials.warm(reference, lowered)
        except (LoweringFailed, PassFailed) as error:
            if is_shortage(error):
                raise shortage(error) from error
            failed = f"{backend.name} failed on the check images: {error}"
            detail = error.detail if isinstance(error, LoweringFailed) else failed
            raise BackendRefused(detail, backend.name, instead) from error
        if not candidate.agrees:
            if spec.precision == "int8":
                raise await self._too_far(record, extractor, candidate, lowered)
            detail = f"{backend.name} in {spec.precision} {candidate.reason}"
            raise BackendRefused(detail, backend.name, instead, **candidate.figures())
        candidate.state = CandidateState.SERVING
        record.backend = backend.name
        self._lowered.add(record)
        record.checks = report(record, candidate, [candidate])
        record.run = lowered if candidate.any_size else OneSize(lowered, reference.row_shapes)
        if isinstance(lowered, EagerInt8):
            record.checks |= shown(lowered.layers)
        elif spec.precision == "int8":
            self._begin(record, self._simulated(record, extractor, candidate))

    async def _measured(
        self, record: ExtractorRecord, original: Callable[..., Any], eager: Lowered, own: Candidate
    ) -> Candidate:
        """Measure how far ``eager``, in which batch norms are folded, is from ``original`` on a photograph.

        Requests do not wait for it. Until it is done, or if it fails, the errors are None.
        """
        try:
            # Not in a pool, whose work takes longer than this does.
            rows = await asyncio.to_thread(check_photographs, record, self._device, 1)
            reference = Reference(original, rows, record.spec.precision)
            await self._trials.compare_one(own, reference, eager)
            own.state, own.reason = CandidateState.SERVING, None
            if record.run is eager:
                record.checks = report(record, own, [own])
        except (Problem, PassFailed) as error:
            log.warning("how far eager is from extractor %s was not measured: %s", record.id, error)
        except Exception:
            log.exception("how far eager is from extractor %s was not measured", record.id)
        return own

    def _begin(self, record: ExtractorRecord, check: Coroutine[Any, Any, Candidate]) -> None:
        """Start a measurement of ``record`` in the background."""
        record.check = background(check)
        self._checks.add(record.check)
        record.check.add_done_callback(self._checks.discard)

    async def _simulated(self, record: ExtractorRecord, extractor: Extractor, candidate: Candidate) -> Candidate:
        """Measure what each layer loses in int8, unless the backend reports it itself."""
        try:
            layers = await in_pool(self._background, simulation, record, extractor, self._settings.calibration_dir)
            if record.checks is not None:
                record.checks = record.checks | shown(layers)
        except Exception:
            log.exception("what the layers of extractor %s lose in int8 was not found", record.id)
        return candidate

    async def _too_far(
        self, record: ExtractorRecord, extractor: Extractor, far: Candidate, lowered: Lowered
    ) -> BackendRefused:
        """The error for a spec whose int8 is too far from float32."""
        if isinstance(lowered, EagerInt8):
            return int8_refusal(far, lowered.layers)
        folder = self._settings.calibration_dir
        return int8_refusal(far, await in_pool(self._foreground, simulation, record, extractor, folder))

    def used(self, record: ExtractorRecord, images: int) -> None:
        """Count a request that ``record`` answered, and search for a faster backend if it has answered enough and there
        is place for one more that is compiled."""
        record.images += images
        if not self._settings.lowering or record.upgrade is not None:
            return
        if record.images < WORTH_A_COPY and has_copy(self._lowered, record.model_key):
            return
        now = time.monotonic()
        if now < self._full_until:
            return
        if has_place(self._lowered, self._usual):
            self.improve(record)
        else:
            self._full_until = now + _FULL_SECONDS

    async def pays(self, record: ExtractorRecord, images: int) -> bool:
        """Whether a search saves time in a run over ``images`` images: an earlier one found a faster backend, or eager
        takes over :data:`WORTH_SECONDS` for them."""
        eager, faster = record.run, self._faster(record)
        if eager is None or not faster:
            return False
        for backend in faster:
            if await asyncio.to_thread(self._verdicts.read, record, backend.name) is not None:
                return True
        rows = await asyncio.to_thread(check_photographs, record, self._device)
        reference = Reference(eager, rows, record.spec.precision)
        try:
            return images * await self._trials.seconds_per_row(reference, eager) > WORTH_SECONDS
        except (PassFailed, NotReady):  # the latter for too little memory
            return False

    def improve(self, record: ExtractorRecord) -> asyncio.Task[None] | None:
        """Start the search for a faster backend, unless it was started before, there is no such backend, or ``record``
        is deleted or unloaded."""
        if record.upgrade is None and record.extractor is not None and (faster := self._faster(record)):
            self._lowered.add(record)
            record.upgrade = background(self._improve(record, record.extractor, faster))
        return record.upgrade

    def _faster(self, record: ExtractorRecord) -> Sequence[Backend]:
        """The backends that may run ``record`` faster than eager."""
        spec = record.spec
        # int8's backend was chosen at the start, by the nodes to keep in float.
        if record.gone or spec.backend != "auto" or spec.precision == "int8":
            return []
        if record.entry.is_quantized(record.weights) or record.entry.dtype != torch.float32:
            return []
        return faster_than_eager(self._device, spec.precision)

    async def _improve(self, record: ExtractorRecord, extractor: Extractor, backends: Sequence[Backend]) -> None:
        """Search for a backend among ``backends`` that is faster than eager, and free what is not used any more."""
        eager = record.run
        if eager is None:
            return
        own = await record.check if record.check is not None else Candidate("eager", CandidateState.SERVING)
        search = Search(
            record, extractor, own, backends, self._lowering, self._trials, self._verdicts, self._background
        )
        await search.run(eager)
        del search, eager
        self.on_upgrade()
        await in_pool(self._background, tidy)

    def _cancel(self, record: ExtractorRecord) -> None:
        """Cancel the lowering of ``record``, and the search that it is part of."""
        self._lowering.cancel(record)
        if record.upgrade is not None:
            record.upgrade.cancel()
