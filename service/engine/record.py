"""The record of one extractor, whether it is in memory or not."""

from __future__ import annotations

import asyncio
import math
import time
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

from fxcore.errors import FxError
from fxcore.extractor import OutputInfo
from service.engine.description import Description
from service.engine.runtime.row_sizes import OUTPUT_BYTES
from service.engine.runtime.runtime import Runtime
from service.problems import Problem

State = Literal["building", "ready", "failed"]

MAX_RETRY_SECONDS = 60.0
"""Maximum seconds between two attempts to build an extractor whose build fails."""


def retry_seconds(failures: int) -> float:
    """Return the seconds to wait before a retry, after ``failures`` earlier failures in a row.

    The delay starts at 1 s and doubles each time, up to :data:`MAX_RETRY_SECONDS`.
    """
    return min(2.0 ** min(failures, 16), MAX_RETRY_SECONDS)


@dataclass(frozen=True)
class Before:
    """The details of an evicted runtime that are still reported."""

    last_used: float = field(default_factory=time.monotonic)
    backend: str = "eager"
    checks: dict[str, Any] | None = None


@dataclass
class Failed:
    """A failed build.

    Attributes:
        problem: its error; to raise it, use :attr:`ExtractorRecord.failure`.
        retry_at: when the extractor may be built again, on the clock of ``time.monotonic()``.
    """

    problem: FxError | Problem
    retry_at: float


Phase = asyncio.Task[Runtime | None] | Runtime | Failed | None
"""Being built by a task, ready with a runtime, failed, or evicted: then the next request builds it."""


@dataclass(eq=False)
class ExtractorRecord:
    """One extractor, from its first request until it is deleted. Only the event loop changes it.

    Attributes:
        description: the extractor's description.
        names: the names it has, in the order they were given.
        phase: whether it is being built, ready, failed or evicted, and what belongs to that.
        failures: number of failed builds in a row.
        outputs: its outputs, in the order requested; known after the first build.
        pinned: preloaded, never evicted.
        waiting: number of requests waiting for its build.
        saved: whether the store had it at the last check.
        put_at: when it was last saved to the store, successfully or not, on the clock of ``time.monotonic()``.
        adopted: whether another process created it and this one read it from the store.
        deleted: whether it was deleted: only requests that already hold the record are still answered.
    """

    description: Description
    names: list[str] = field(default_factory=list)
    phase: Phase = None
    failures: int = 0
    outputs: list[OutputInfo] = field(default_factory=list)
    pinned: bool = False
    waiting: int = 0
    saved: bool = False
    put_at: float = -math.inf
    adopted: bool = False
    deleted: bool = False
    _before: Before = field(default_factory=Before)

    @property
    def id(self) -> str:
        return self.description.id

    @property
    def name(self) -> str | None:
        """The last name it was given and still has."""
        return next(iter(self.names[-1:]), None)  # listings read it in other threads

    @property
    def state(self) -> State:
        """``building``, ``failed`` or ``ready``, which it also is when evicted."""
        phase = self.phase
        if isinstance(phase, asyncio.Task):
            return "building"
        return "failed" if isinstance(phase, Failed) else "ready"

    @property
    def build(self) -> asyncio.Task[Runtime | None] | None:
        """The task that builds it, while it runs."""
        phase = self.phase
        return phase if isinstance(phase, asyncio.Task) else None

    @property
    def runtime(self) -> Runtime | None:
        """Its built form; None until it is built and after eviction."""
        phase = self.phase
        return phase if isinstance(phase, Runtime) else None

    @property
    def problem(self) -> FxError | Problem | None:
        """The error of a failed build; to raise it, use :attr:`failure`."""
        phase = self.phase
        return phase.problem if isinstance(phase, Failed) else None

    @property
    def pinned_or_active(self) -> bool:
        """Whether it must stay in memory: it is pinned, being built or waited for, or has requests in flight."""
        busy = self.runtime is not None and self.runtime.busy
        return self.pinned or busy or self.waiting > 0 or self.build is not None

    @property
    def last_used(self) -> float:
        """When it was last used, on the clock of ``time.monotonic()``."""
        return (self.runtime or self._before).last_used

    @property
    def backend(self) -> str:
        """The backend that runs it, or ran it when it was last in memory."""
        return (self.runtime or self._before).backend

    @property
    def checks(self) -> dict[str, Any] | None:
        """How far that backend's values are from the model's own; None until it is built."""
        return (self.runtime or self._before).checks

    def retire(self) -> None:
        """Retire its runtime, if it has one. The next request builds it again."""
        runtime = self.runtime
        if runtime is not None:
            self._before = Before(runtime.last_used, runtime.backend, runtime.checks)
            self.phase = None
            runtime.retire()

    def cancel(self) -> None:
        """Cancel its build, if it is being built. Not a failure: the next request builds it again."""
        if self.build is not None:
            self.build.cancel()
            self.phase = None

    def fail(self, problem: FxError | Problem) -> None:
        """Record that its build failed; it may be tried again after :func:`retry_seconds`."""
        # The frames of a traceback would keep a model and its extractor in memory.
        problem.__cause__ = problem.__context__ = None
        self.phase = Failed(problem.with_traceback(None), time.monotonic() + retry_seconds(self.failures))
        self.failures += 1

    @property
    def failure(self) -> FxError | Problem | None:
        """A copy of ``problem`` to raise. If it is temporary, it reports when the build may be tried again."""
        phase = self.phase
        if not isinstance(phase, Failed):
            return None
        failure = copy(phase.problem)
        if isinstance(failure, Problem) and failure.retry_after is not None:
            failure.retry_after = max(0.0, phase.retry_at - time.monotonic())
        return failure

    @property
    def bytes(self) -> int:
        """Approximate bytes of the record of an evicted extractor: its spec, nodes, outputs, names and problem."""
        names = sum(_NAME_BYTES + 2 * len(name) for name in self.names)
        problem = 0 if self.problem is None else 4 * len(self.problem.detail)
        outputs = 2 * OUTPUT_BYTES * len(self.outputs)
        return _RECORD_BYTES + 4 * self.description.spec_bytes + outputs + names + problem


_RECORD_BYTES = 8 * 1024
"""Bytes of an empty record with its preprocessing and decoder."""

_NAME_BYTES = 200
"""Approximate bytes of a name in a list and a dictionary, without its characters."""
