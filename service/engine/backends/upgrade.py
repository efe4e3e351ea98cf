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
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from typing import Any

import torch

from fxcore.backends import Backend, Lowered, LoweringFailed, faster_than_eager
from fxcore.backends.eager import EagerInt8
from service.engine.backends.checks import PassFailed, Reference, check_photographs, report
from service.engine.backends.choice import chosen_backend
from service.engine.backends.fallback import OneSize
from service.engine.backends.int8_advice import int8_refusal, shown, simulation
from service.engine.backends.lowering import Lowering
from service.engine.backends.search import Search
from service.engine.backends.trials import Trials
from service.engine.backends.verdicts import Verdicts
from service.engine.candidate import Candidate, CandidateState
from service.engine.description import ModelKey
from service.engine.device.queue import Queue
from service.engine.device.threads import Pool, compute_on, in_pool
from service.engine.errors import is_shortage, shortage
from service.engine.placement import BUSY_SECONDS
from service.engine.record import ExtractorRecord
from service.engine.rows import RowShape
from service.engine.runtime import Runtime
from service.engine.tasks import background
from service.garbage import tidy
from service.problems import BackendRefused, NotReady, Problem
from service.settings import Settings

log = logging.getLogger("fxserve.upgrades")

WORTH_A_COPY = 16
"""Images that an extractor answers before it gets a lowered copy of weights that another extractor has lowered
already; and images that a variant of it answers before that gets one."""

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
        records: a view of all extractors.
    """

    def __init__(
        self, device: torch.device, queue: Queue, settings: Settings, usual: int, records: Collection[ExtractorRecord]
    ) -> None:
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
        self._usual = usual
        self._records = records
        self._full_until = 0.0  # on the clock of time.monotonic(): requests do not count the compiled ones each time

    def start(self) -> None:
        """Start the threads."""
        self._foreground.start()
        self._background.start()

    def close(self) -> None:
        """Cancel all lowerings."""
        self._lowering.cancel_all()
        for pool in (self._foreground, self._background):
            pool.shutdown(wait=False, cancel_futures=True)

    async def first(self, runtime: Runtime, original: Callable[..., Any], pool: Executor) -> None:
        """Set what runs the first request of ``runtime``.

        Args:
            original: computes what the model itself does, as ``runtime.extractor.module`` did before any transform.
            pool: the threads that prepare eager, which is as quick as building an extractor.

        Raises:
            BackendRefused: the backend that the spec names cannot lower the model, or is too far from eager.
        """
        description = runtime.description
        spec = description.spec
        backend = chosen_backend(spec, self._device)
        if backend.name == "eager" and spec.precision != "int8":
            own = Candidate("eager", CandidateState.SERVING)
            runtime.measured = report(spec.precision, own, [own])
            options = self._lowering.options(description)
            run = await in_pool(pool, backend.lower, runtime.extractor.module, (), options)
            runtime.serve(run, "eager")
            runtime.check = background(self._measured(runtime, original, run, own))
        else:
            await self._lowered_first(runtime, backend)

    async def _lowered_first(self, runtime: Runtime, backend: Backend) -> None:
        """Lower before the first request, and compare: the backend serves, or the spec is refused."""
        spec = runtime.description.spec
        candidate = Candidate(backend.name)
        instead = f"ask for {'precision=float32' if spec.backend == 'auto' else 'backend=auto, or another precision'}"
        try:
            lowered, reference = await self._lowering.lower(runtime, backend, self._foreground)
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
                raise await self._too_far(runtime, candidate, lowered)
            detail = f"{backend.name} in {spec.precision} {candidate.reason}"
            raise BackendRefused(detail, backend.name, instead, **candidate.figures())
        candidate.state = CandidateState.SERVING
        runtime.measured = report(spec.precision, candidate, [candidate])
        runtime.serve(lowered if candidate.any_size else OneSize(lowered, reference.row_shapes), backend.name)
        if isinstance(lowered, EagerInt8):
            runtime.measured |= shown(lowered.layers)
        elif spec.precision == "int8":
            runtime.check = background(self._simulated(runtime, candidate))

    async def _measured(
        self, runtime: Runtime, original: Callable[..., Any], eager: Lowered, own: Candidate
    ) -> Candidate:
        """Measure how far ``eager``, in which batch norms are folded, is from ``original`` on a photograph.

        Requests do not wait for it. Until it is done, or if it fails, the errors are None.
        """
        description = runtime.description
        try:
            # Not in a pool, whose work takes longer than this does.
            rows = await asyncio.to_thread(check_photographs, description, runtime.extractor, self._device, 1)
            reference = Reference(original, rows, description.spec.precision)
            await self._trials.compare_one(own, reference, eager)
            own.state, own.reason = CandidateState.SERVING, None
            if runtime.run is eager:
                runtime.measured = report(description.spec.precision, own, [own])
        except (Problem, PassFailed) as error:
            log.warning("how far eager is from extractor %s was not measured: %s", description.id, error)
        except Exception:
            log.exception("how far eager is from extractor %s was not measured", description.id)
        return own

    async def _simulated(self, runtime: Runtime, candidate: Candidate) -> Candidate:
        """Measure what each layer loses in int8, unless the backend reports it itself."""
        try:
            layers = await in_pool(
                self._background, simulation, runtime.description, runtime.extractor, self._settings.calibration_dir
            )
            runtime.measured = runtime.measured | shown(layers)
        except Exception:
            log.exception("what the layers of extractor %s lose in int8 was not found", runtime.description.id)
        return candidate

    async def _too_far(self, runtime: Runtime, far: Candidate, lowered: Lowered) -> BackendRefused:
        """Return the error for a spec whose int8 is too far from float32."""
        if isinstance(lowered, EagerInt8):
            return int8_refusal(far, lowered.layers)
        made, folder = (runtime.description, runtime.extractor), self._settings.calibration_dir
        return int8_refusal(far, await in_pool(self._foreground, simulation, *made, folder))

    def used(self, runtime: Runtime, shapes: Sequence[RowShape]) -> None:
        """Count a request with rows of ``shapes`` that ``runtime`` answered, and search for a faster backend for what
        has answered enough, if there is place for one more that is compiled: for the extractor, and for each of its
        variants."""
        for one, images in Counter(map(runtime.at, shapes)).items():
            self._count(one, images, worth=WORTH_A_COPY if one is not runtime or runtime.description.edits else 0)

    def _count(self, runtime: Runtime, images: int, worth: int) -> None:
        runtime.images += images
        if not self._settings.lowering or runtime.upgrade is not None:
            return
        if runtime.images < worth:
            return
        if runtime.images < WORTH_A_COPY and self._has_copy(runtime.description.model_key):
            return
        now = time.monotonic()
        if now < self._full_until:
            return
        if self._has_place():
            self.improve(runtime)
        else:
            self._full_until = now + _FULL_SECONDS

    async def pays(self, runtime: Runtime, images: int) -> bool:
        """Return whether a search saves time in a run over ``images`` images: an earlier one found a faster backend, or
        eager takes over :data:`WORTH_SECONDS` for them."""
        description, eager, faster = runtime.description, runtime.run, self._faster(runtime)
        if not faster:
            return False
        for backend in faster:
            if await asyncio.to_thread(self._verdicts.read, description, backend.name) is not None:
                return True
        rows = await asyncio.to_thread(check_photographs, description, runtime.extractor, self._device)
        reference = Reference(eager, rows, description.spec.precision)
        try:
            return images * await self._trials.seconds_per_row(reference, eager) > WORTH_SECONDS
        except (PassFailed, NotReady):  # the latter for too little memory
            return False

    def improve(self, runtime: Runtime) -> asyncio.Task[None] | None:
        """Start the search for a faster backend, unless it was started before, there is no such backend, or ``runtime``
        is retired."""
        if runtime.upgrade is None and (faster := self._faster(runtime)):
            runtime.upgrade = background(self._improve(runtime, faster))
        return runtime.upgrade

    def _has_copy(self, key: ModelKey) -> bool:
        """Return whether an extractor holds a lowered copy of the weights ``key``, or is about to."""
        over = (record.runtime for record in self._records if record.description.model_key == key)
        return any(r is not None and r.upgrade is not None and (r.backend != "eager" or r.searched) for r in over)

    def _has_place(self) -> bool:
        """Return whether one more extractor may be compiled: there are fewer than usual, or one that was not used for
        long can be evicted for it."""
        unused = time.monotonic() - BUSY_SECONDS
        compiled = [
            (record, one)
            for record in self._records
            if record.runtime is not None
            for one in record.runtime.all
            if one.backend == "openvino" or one.searched
        ]
        evictable = (one for record, one in compiled if not record.pinned_or_active)
        return len(compiled) < self._usual or any(one.last_used < unused for one in evictable)

    def _faster(self, runtime: Runtime) -> Sequence[Backend]:
        """Return the backends that may run ``runtime`` faster than eager."""
        description = runtime.description
        spec, entry = description.spec, description.entry
        # int8's backend was chosen at the start, by the nodes to keep in float.
        if runtime.retired or spec.backend != "auto" or spec.precision == "int8":
            return []
        if entry.is_quantized(description.weights) or entry.dtype != torch.float32:
            return []
        return faster_than_eager(self._device, spec.precision)

    async def _improve(self, runtime: Runtime, backends: Sequence[Backend]) -> None:
        """Search for a backend among ``backends`` that is faster than eager, and free what is not used any more."""
        own = await runtime.check if runtime.check is not None else Candidate("eager", CandidateState.SERVING)
        search = Search(runtime, own, backends, self._lowering, self._trials, self._verdicts, self._background)
        await search.run(runtime.run)
        del search
        self.on_upgrade()
        await in_pool(self._background, tidy)
