"""The backend of an extractor: it answers at once, and is then replaced by a faster one.

``backend=auto`` starts on eager. Once the extractor is used, a faster backend is lowered in the background, compared
with eager float32 on photographs, and timed. If it agrees and is faster, it takes over between two batches, and the
verdict is cached for the next start (:mod:`service.engine.backends.verdicts`). A backend requested by name is lowered
and compared before the first request, and is either used or refused.

The states are those of a :class:`~service.engine.runtime.candidate.Candidate`::

    waiting ─lower─▶ lowering ─compare─▶ agrees ─race─▶ faster ─swap─▶ serving ─fall back─▶ failed
                         │                 │              │
                         ▼                 ▼              ▼
                       failed           differs         slower

Eager serves until a candidate takes over; then its state is ``replaced``, and it serves again if the candidate fails. A
backend requested by name is not raced.

Lowering runs in child processes, one at a time; comparisons and timings run on the device worker, when no request waits
(:mod:`service.engine.backends.trials`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxcore.backends import Backend, Lowered, LoweringFailed, Options
from fxcore.backends.eager import EagerInt8
from fxcore.errors import summarize
from fxcore.graph.flops import FlopCounter
from fxcore.int8.report import LayerError
from service.engine.backends.checks import PassFailed, Reference, calibration_of, check_photographs, larger_shapes
from service.engine.backends.choice import chosen_backend, faster_backends
from service.engine.backends.fallback import OnlyBackend, Unlowered, WithFallback
from service.engine.backends.int8_advice import int8_refusal, simulation, worst
from service.engine.backends.trials import Trials
from service.engine.backends.verdicts import Verdicts
from service.engine.errors import is_shortage, shortage
from service.engine.record import retry_seconds
from service.engine.runtime.candidate import Candidate, CandidateState
from service.engine.runtime.collecting import Collector
from service.engine.runtime.runtime import Runtime
from service.engine.tasks import background
from service.engine.threads import in_pool
from service.problems import BackendRefused, NotReady, Problem
from service.settings import Settings

log = logging.getLogger("fxserve.upgrades")

_ATTEMPTS = 5
"""Maximum attempts at a faster backend while the system is short of threads or memory."""


@dataclass
class Tools:
    """The resources shared by the upgrades of all extractors.

    Attributes:
        settings: threads, cache, and calibration photographs.
        trials: compares and times on the device worker.
        verdicts: cached results of earlier searches.
        foreground: the thread that lowers extractors that requests wait for.
        background: the thread that lowers upgrades.
        make_room: evicts until the given number of bytes fits into memory.
        collector: garbage-collects replaced backends and retired runtimes.
        searching: held by the extractor for which a faster backend is lowered and timed.
        lowerings: the cancel events of lowerings in progress; setting one cancels it.
        remade: (extractor, backend) pairs whose artifact was rebuilt: if it still disagrees, it is not damaged.
    """

    settings: Settings
    trials: Trials
    verdicts: Verdicts
    foreground: Executor
    background: Executor
    make_room: Callable[[int], None]
    collector: Collector
    searching: asyncio.Lock = field(default_factory=asyncio.Lock)
    lowerings: set[threading.Event] = field(default_factory=set)
    remade: set[tuple[str, str]] = field(default_factory=set)

    def cancel(self) -> None:
        """Cancel all lowerings."""
        for cancelled in self.lowerings:
            cancelled.set()


class Upgrade:
    """The backends of one extractor. For one event loop.

    It lives as long as the backend it finds, which reports failures to it. It therefore keeps no reference to the
    replaced eager module, which may hold its own weights.
    """

    def __init__(self, runtime: Runtime, tools: Tools) -> None:
        self._runtime = runtime
        self._tools = tools

    async def first(self, original: Callable[..., Any] | None, pool: Executor) -> None:
        """Set the backend for the first request, and start the background task that continues from there.

        Args:
            original: the model before any transform, the reference to compare with; None if the error of the first
                backend need not be measured.
            pool: the threads that prepare eager, which takes no longer than building an extractor.

        Raises:
            BackendRefused: the requested backend cannot lower the model, or is too far from eager, or the model cannot
                run in the requested precision.
        """
        runtime = self._runtime
        spec = runtime.description.spec
        backend = chosen_backend(spec, torch.device(runtime.description.device))
        if backend.name == "eager" and spec.precision != "int8":
            run = await in_pool(pool, backend.lower, runtime.extractor.module, (), self._options())
            if original is not None and runtime.description.dtype != runtime.description.entry.dtype:
                await self._require_dtype(run)
            self._serve(run, Candidate("eager"))
            runtime.upgrade = background(self._from_eager(original, run), "upgrade")
        elif await self._only(backend) and original is not None:
            runtime.upgrade = background(self._simulate(), "int8")
        else:
            runtime.checked.set()

    # A backend without an alternative: requested by name, or the one for int8

    async def _only(self, backend: Backend) -> bool:
        """Lower and compare the only backend, which then serves or is refused.

        Returns whether the int8 loss of its layers is still to be measured.
        """
        runtime, trials, candidate = self._runtime, self._tools.trials, Candidate(backend.name)
        spec = runtime.description.spec
        instead = f"ask for {'precision=float32' if spec.backend == 'auto' else 'backend=auto, or another precision'}"
        try:
            lowered, reference = await self._lower(backend, self._tools.foreground)
            await trials.compare(candidate, reference, lowered)
            await trials.warm(reference, lowered)
        except (LoweringFailed, PassFailed) as error:
            if is_shortage(error):
                raise shortage(error) from error
            failed = f"{backend.name} failed on the check images: {error}"
            detail = error.detail if isinstance(error, LoweringFailed) else failed
            raise BackendRefused(detail, backend.name, instead) from error
        layers = list(lowered.layers) if isinstance(lowered, EagerInt8) else None
        if not candidate.agrees:
            if spec.precision == "int8":
                if layers is None:
                    layers = await self._simulated(self._tools.foreground)
                raise int8_refusal(candidate, layers)
            detail = f"{backend.name} in {spec.precision} {candidate.reason}"
            raise BackendRefused(detail, backend.name, instead, **candidate.figures())
        self._serve(OnlyBackend(lowered, reference.row_shapes, candidate.any_size, instead), candidate)
        if layers is not None:
            runtime.layers = worst(layers)
        return spec.precision == "int8" and layers is None

    async def _simulate(self) -> None:
        """Measure the int8 loss of each layer, for backends that do not report it themselves."""
        runtime = self._runtime
        try:
            runtime.layers = worst(await self._simulated(self._tools.background))
        except Exception:
            log.exception("what the layers of extractor %s lose in int8 was not found", runtime.description.id)
        runtime.checked.set()

    async def _simulated(self, pool: Executor) -> list[LayerError]:
        runtime = self._runtime
        return await in_pool(
            pool, simulation, runtime.description, runtime.extractor, self._tools.settings.calibration_dir
        )

    # From eager to a faster backend

    async def _require_dtype(self, eager: Lowered) -> None:
        """Run ``eager`` once, in a dtype that is not the model's own; operations such as FFTs may not support it.

        Raises:
            BackendRefused: it fails.
        """
        runtime, trials = self._runtime, self._tools.trials
        description = runtime.description
        try:
            rows = await asyncio.to_thread(check_photographs, description, runtime.extractor, 1)
        except Exception:  # of the part of the model before the extractor's own inputs, which need not run in it
            log.warning("extractor %s was not run before its first request", description.id, exc_info=True)
            return
        try:
            await trials.run_once(Reference(runtime.extractor.module, rows, description.spec.precision), eager)
        except PassFailed as error:
            if is_shortage(error):
                raise shortage(error) from error
            detail = f"{description.entry.name} cannot run in {description.spec.precision} on eager: {error}"
            raise BackendRefused(detail, "eager", "ask for precision=float32") from error

    async def _from_eager(self, original: Callable[..., Any] | None, eager: Lowered) -> None:
        """Measure eager and, once requested, search for a faster backend."""
        runtime = self._runtime
        if original is not None:
            await self._measure(original, eager)
        del original, eager  # they may hold their own weights
        runtime.checked.set()
        if not faster_backends(runtime.description):
            return
        await runtime.wanted.wait()
        await self._search()
        self._tools.make_room(0)  # a new backend needs memory
        self._tools.collector.soon()  # the one it replaced

    async def _measure(self, original: Callable[..., Any], eager: Lowered) -> None:
        """Measure the error of ``eager``, in which batch norms are folded, against ``original`` on a photograph.

        Requests do not wait for it. The errors are None until it is done, or if it fails.
        """
        runtime, own = self._runtime, self._runtime.serving
        description = runtime.description
        try:
            # Not in one of the pools, whose tasks take longer than this.
            if description.spec.image_size is not None:
                await asyncio.to_thread(self._check_time)
            rows = await asyncio.to_thread(check_photographs, description, runtime.extractor, 1)
            await self._tools.trials.compare_one(own, Reference(original, rows, description.spec.precision), eager)
            own.state, own.reason = CandidateState.SERVING, None
        except (Problem, PassFailed) as error:
            log.warning("how far eager is from extractor %s was not measured: %s", description.id, error)
        except Exception:
            log.exception("how far eager is from extractor %s was not measured", description.id)

    def _check_time(self) -> None:
        """Check that computing a photograph takes no longer than any request may.

        Raises:
            DeadlineExceeded: it takes longer.
        """
        runtime = self._runtime
        usual = runtime.description.usual_shapes()
        with FlopCounter() as counter:
            runtime.extractor.values_at(usual)
        runtime.pace.check(counter.total, self._tools.settings.request_timeout, usual)

    async def _search(self) -> None:
        """Try backends one after another until one replaces eager."""
        runtime = self._runtime
        eager = runtime.run
        others = [(Candidate(b.name), b) for b in faster_backends(runtime.description)]
        runtime.candidates = [*runtime.candidates, *(candidate for candidate, _ in others)]
        for candidate, backend in others:
            for attempt in range(_ATTEMPTS):
                await self._try(candidate, backend, eager, attempt)
                if candidate.state is not CandidateState.WAITING:
                    break
                await asyncio.sleep(retry_seconds(attempt))
            if candidate.state is CandidateState.SERVING:
                return

    async def _try(self, candidate: Candidate, backend: Backend, eager: Lowered, attempt: int) -> None:
        """Lower to ``backend``, and replace ``eager`` with the result if it agrees and is faster.

        After a shortage, unless this is the last attempt, the candidate is waiting again.
        """
        runtime = self._runtime
        try:
            # Those that wait for their turn are not in use, so that they can be evicted.
            async with self._tools.searching:
                candidate.state = CandidateState.LOWERING
                with runtime.in_use():
                    lowered, reference = await self._lower(backend, self._tools.background)
                    faster = await self._is_faster(candidate, reference, eager, lowered)
                    if faster:
                        await self._tools.trials.warm(reference, lowered)
            if faster and not runtime.retired:
                self._swap(candidate, reference, eager, lowered)
        except (LoweringFailed, Problem, PassFailed) as error:
            candidate.fail(getattr(error, "detail", str(error)))
            log.warning("extractor %s stays on eager: %s", runtime.description.id, candidate.reason)
            # On the device worker a shortage becomes NotReady.
            if attempt < _ATTEMPTS - 1 and (isinstance(error, NotReady) or is_shortage(error)):
                candidate.state = CandidateState.WAITING
        except Exception as error:
            candidate.fail(summarize(error))
            log.exception("looking for a faster backend for extractor %s failed", runtime.description.id)

    async def _is_faster(self, candidate: Candidate, reference: Reference, eager: Lowered, lowered: Lowered) -> bool:
        """Return whether ``lowered`` agrees and is faster.

        A cached verdict is used if one photograph confirms it; otherwise both are measured.
        """
        description, own = self._runtime.description, self._runtime.serving
        trials, verdicts = self._tools.trials, self._tools.verdicts
        # Not in the lowering pool, where it would wait for other lowerings.
        known = await asyncio.to_thread(verdicts.read, description, candidate.backend)
        if known is not None:
            now = Candidate(candidate.backend)
            await trials.compare_one(now, reference, lowered)
            if now.agrees:
                for one, before in zip((own, candidate), known, strict=True):
                    one.recall(before)
                return True
        await trials.compare(candidate, reference, lowered)
        faster = candidate.agrees and await trials.race(reference, own, eager, candidate, lowered)
        if faster:
            await asyncio.to_thread(verdicts.write, description, own, candidate)
        return faster

    def _swap(self, candidate: Candidate, reference: Reference, eager: Lowered, lowered: Lowered) -> None:
        """Make ``lowered`` serve. Eager still runs unsupported sizes, and everything if ``lowered`` fails."""
        runtime, own = self._runtime, self._runtime.serving
        # If eager still runs other sizes, keep it optimised. A mere fallback need not hold folded weights.
        behind = Unlowered(runtime.extractor.module) if candidate.any_size else eager
        loop = asyncio.get_running_loop()

        def failed(error: BaseException) -> None:  # on the device worker's thread
            loop.call_soon_threadsafe(self._fall_back, candidate, own, error)

        own.state, candidate.state = CandidateState.REPLACED, CandidateState.SERVING
        runtime.serve(WithFallback(lowered, behind, reference.row_shapes, candidate.any_size, failed), candidate)
        log.info("extractor %s runs on %s now: %s", runtime.description.id, candidate.backend, candidate.ms)

    def _fall_back(self, candidate: Candidate, own: Candidate, error: BaseException) -> None:
        """Record that ``candidate`` failed after it took over, and that eager serves again."""
        runtime, why = self._runtime, summarize(error)
        candidate.fail(why)
        own.state = CandidateState.SERVING
        runtime.serve(runtime.run, own)
        log.error(
            "%s failed for extractor %s; eager serves it again: %s", candidate.backend, runtime.description.id, why
        )

    # Both

    def _serve(self, run: Lowered, candidate: Candidate) -> None:
        candidate.state = CandidateState.SERVING
        self._runtime.candidates = [candidate]
        self._runtime.serve(run, candidate)

    async def _lower(self, backend: Backend, pool: Executor) -> tuple[Lowered, Reference]:
        """Lower in ``pool``, and return the result and the reference to compare it with.

        A cached artifact is checked on one photograph: a damaged one may load and compute something else. Cancelling
        the call cancels the lowering.

        Raises:
            LoweringFailed: the backend does not support the model, or the lowering was cancelled.
        """
        tools, description, extractor = self._tools, self._runtime.description, self._runtime.extractor
        cancelled = threading.Event()

        def work(reuse: bool) -> tuple[Lowered, Reference]:
            if cancelled.is_set():
                raise LoweringFailed(f"lowering to {backend.name} was cancelled", backend=backend.name)
            rows = check_photographs(description, extractor)
            int8 = description.spec.precision == "int8"
            calibration = calibration_of(description, extractor, tools.settings.calibration_dir) if int8 else []
            two = tuple(torch.cat([a, b]) for a, b in zip(rows[0], rows[1], strict=True))
            options = replace(self._options(), cancelled=cancelled, reuse=reuse, calibration=calibration)
            lowered = backend.lower(extractor.module, two, options)
            larger = larger_shapes(extractor, rows[0])
            return lowered, Reference(extractor.module, rows, description.spec.precision, larger)

        tools.lowerings.add(cancelled)
        try:
            lowered, reference = await in_pool(pool, work, True)
            artifact = description.id, backend.name
            recalled = getattr(lowered, "recalled", False) and artifact not in tools.remade
            if recalled and not await self._confirmed(backend, reference, lowered):
                log.warning("the cached compiled model of extractor %s is wrong and is compiled again", description.id)
                tools.remade.add(artifact)
                lowered, reference = await in_pool(pool, work, False)
            return lowered, reference
        finally:
            cancelled.set()
            tools.lowerings.discard(cancelled)

    async def _confirmed(self, backend: Backend, reference: Reference, lowered: Lowered) -> bool:
        candidate = Candidate(backend.name)
        with suppress(PassFailed):
            await self._tools.trials.compare_one(candidate, reference, lowered)
        return candidate.agrees

    def _options(self) -> Options:
        settings = self._tools.settings
        precision = self._runtime.description.spec.precision
        return Options(precision, settings.compute_threads, settings.cache_dir)
