"""The search for a backend that runs an extractor faster than eager, which serves it meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

from fxcore.backends import Backend, Lowered, LoweringFailed
from fxcore.errors import summarize
from service.engine.backends.checks import PassFailed, Reference, report
from service.engine.backends.fallback import Plain, Swapped
from service.engine.backends.lowering import Lowering
from service.engine.backends.trials import Trials
from service.engine.backends.verdicts import Verdicts
from service.engine.candidate import Candidate, CandidateState
from service.engine.runtime import Runtime
from service.problems import Problem

log = logging.getLogger("fxserve.upgrades")


class Search:
    """The search for one extractor. For one event loop.

    It stays in memory as long as the backend that it finds, which reports failures to it. So it does not keep the eager
    module that was replaced, which may hold weights of its own.

    Args:
        runtime: the extractor.
        own: the candidate of eager.
        backends: to try, in this order.
        lowering: lowers to them.
        trials: compares and times on the device worker.
        verdicts: what earlier searches found.
        pool: the thread that lowers.
    """

    def __init__(
        self,
        runtime: Runtime,
        own: Candidate,
        backends: Sequence[Backend],
        lowering: Lowering,
        trials: Trials,
        verdicts: Verdicts,
        pool: Executor,
    ) -> None:
        self._runtime = runtime
        self._own = own
        self._others = [(Candidate(backend.name), backend) for backend in backends]
        self._lowering = lowering
        self._trials = trials
        self._verdicts = verdicts
        self._pool = pool

    async def run(self, eager: Lowered) -> None:
        """Try the backends, one after another, until one replaces ``eager``, which serves now."""
        for candidate, backend in self._others:
            candidate.state = CandidateState.LOWERING
            self._report(self._own)
            await self._try(candidate, backend, eager)
            if candidate.state is CandidateState.SERVING:
                self._report(candidate)
                return
            self._report(self._own)

    async def _try(self, candidate: Candidate, backend: Backend, eager: Lowered) -> None:
        """Lower to ``backend``, and replace ``eager`` if the result agrees with it and is faster."""
        runtime = self._runtime
        try:
            with runtime.in_use():
                lowered, reference = await self._lowering.lower(runtime, backend, self._pool)
                faster = await self._is_faster(candidate, reference, eager, lowered)
                if faster:
                    await self._trials.warm(reference, lowered)
            if faster and not runtime.retired:
                self._replace(eager, candidate, reference, lowered)
        except (LoweringFailed, Problem, PassFailed) as error:
            candidate.fail(getattr(error, "detail", str(error)))
            log.warning("extractor %s stays on eager: %s", runtime.description.id, candidate.reason)
        except Exception as error:
            candidate.fail(summarize(error))
            log.exception("looking for a faster backend for extractor %s failed", runtime.description.id)

    async def _is_faster(self, candidate: Candidate, reference: Reference, eager: Lowered, lowered: Lowered) -> bool:
        """Return whether ``lowered`` agrees and is faster: by a cached verdict that one photograph confirms, else
        measured now."""
        description, own = self._runtime.description, self._own
        # Not in the pool that lowers, where it would wait for the lowerings of others.
        known = await asyncio.to_thread(self._verdicts.read, description, candidate.backend)
        if known is not None:
            now = Candidate(candidate.backend)
            await self._trials.compare_one(now, reference, lowered)
            if now.agrees:
                for one, before in zip((own, candidate), known, strict=True):
                    one.recall(before)
                return True
        await self._trials.compare(candidate, reference, lowered)
        faster = candidate.agrees and await self._trials.race(reference, own, eager, candidate, lowered)
        if faster:
            await asyncio.to_thread(self._verdicts.write, description, own, candidate)
        return faster

    def _replace(self, eager: Lowered, candidate: Candidate, reference: Reference, lowered: Lowered) -> None:
        """Let ``lowered`` serve. Eager still runs the sizes that it does not take, and all if it fails."""
        runtime = self._runtime
        # Where eager runs other sizes it stays as fast; as a mere fallback it need not hold folded weights.
        behind = Plain(runtime.extractor.module) if candidate.any_size else eager
        shapes = None if candidate.any_size else reference.row_shapes
        loop = asyncio.get_running_loop()

        def failed(error: BaseException) -> None:  # on the device worker's thread
            loop.call_soon_threadsafe(self._fall_back, candidate, error)

        self._own.state, candidate.state = CandidateState.REPLACED, CandidateState.SERVING
        runtime.serve(Swapped(lowered, behind, shapes, failed), candidate.backend)
        log.info("extractor %s runs on %s now: %s", runtime.description.id, candidate.backend, candidate.ms)

    def _fall_back(self, candidate: Candidate, error: BaseException) -> None:
        """Record that ``candidate`` failed a batch after it took over, and that eager serves again."""
        runtime = self._runtime
        candidate.fail(summarize(error))
        log.error(
            "%s failed for extractor %s; eager serves it again: %s",
            candidate.backend,
            runtime.description.id,
            summarize(error),
        )
        self._own.state = CandidateState.SERVING
        runtime.serve(runtime.run, "eager")
        self._report(self._own)

    def _report(self, serving: Candidate) -> None:
        self._runtime.measured = report(
            self._runtime.description.spec.precision,
            serving,
            [self._own, *(candidate for candidate, _ in self._others)],
        )
