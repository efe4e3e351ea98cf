"""What the engine knows of one extractor, in memory or not."""

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
from service.engine.runtime.runtime import OUTPUT_BYTES, Runtime
from service.problems import Problem

State = Literal["building", "ready", "failed"]

MAX_RETRY_SECONDS = 60.0
"""Maximum time between two attempts to build an extractor whose build fails."""


def retry_seconds(failures: int) -> float:
    """Return how long to wait before trying again what failed, after ``failures`` earlier failures in a row: 1 s, and
    twice as long each time, up to :data:`MAX_RETRY_SECONDS`."""
    return min(2.0 ** min(failures, 16), MAX_RETRY_SECONDS)


@dataclass(frozen=True)
class Before:
    """What is still told of a runtime that was evicted."""

    last_used: float = field(default_factory=time.monotonic)
    backend: str = "eager"
    checks: dict[str, Any] | None = None


@dataclass(eq=False)
class ExtractorRecord:
    """One extractor, from the moment it is asked for until it is deleted. Only the event loop changes it.

    Attributes:
        description: what it computes.
        name: the name last given to it.
        state: ``building``, ``ready`` or ``failed``; a ready one may be evicted.
        problem: why, when it failed; raise :attr:`failure` instead.
        failures: how many builds in a row have failed.
        retry_at: when a failed build may be tried again, on the clock of ``time.monotonic()``.
        outputs: what it returns, in the order asked for; known once it was built.
        pinned: preloaded, never evicted.
        build: the task that builds it, while it runs.
        waiting: how many requests wait for its build.
        runtime: what computes it; None until it is built and after eviction. The next request builds it again.
        backend: the one that computes it, or did when it was last in memory.
        checks: how far that backend's values are from the model's own; None until it was built.
        saved: whether the store had it when it was last looked for.
        put_at: when it was last saved in the store, or that was tried, on the clock of ``time.monotonic()``.
        adopted: whether another process made it and this one read it from the store.
        deleted: whether it was deleted: it is answered for nobody but those who ask already.
    """

    description: Description
    name: str | None = None
    state: State = "building"
    problem: FxError | Problem | None = None
    failures: int = 0
    retry_at: float = 0.0
    outputs: list[OutputInfo] = field(default_factory=list)
    pinned: bool = False
    build: asyncio.Task[Runtime | None] | None = None
    waiting: int = 0
    runtime: Runtime | None = None
    saved: bool = False
    put_at: float = -math.inf
    adopted: bool = False
    deleted: bool = False
    _before: Before = field(default_factory=Before)

    @property
    def id(self) -> str:
        return self.description.id

    @property
    def active(self) -> bool:
        """Whether it is being built or waited for, or has requests in flight."""
        busy = self.runtime is not None and self.runtime.busy
        return busy or self.waiting > 0 or self.build is not None

    @property
    def pinned_or_active(self) -> bool:
        """Whether it must stay in memory now."""
        return self.pinned or self.active

    @property
    def last_used(self) -> float:
        """When it was last used, on the clock of ``time.monotonic()``."""
        return (self.runtime or self._before).last_used

    @property
    def backend(self) -> str:
        return (self.runtime or self._before).backend

    @property
    def checks(self) -> dict[str, Any] | None:
        return (self.runtime or self._before).checks

    def unload(self) -> Runtime | None:
        """Retire what computes it, which is returned; its requests in flight finish."""
        runtime = self.runtime
        if runtime is not None:
            self._before = Before(runtime.last_used, runtime.backend, runtime.checks)
            self.runtime = None
            runtime.retire()
        return runtime

    def fail(self, problem: FxError | Problem) -> None:
        """Record that its build failed; it may be tried again after :func:`retry_seconds`."""
        # The frames of a traceback would keep a model and its extractor in memory.
        problem.__cause__ = problem.__context__ = None
        self.state, self.problem = "failed", problem.with_traceback(None)
        self.retry_at = time.monotonic() + retry_seconds(self.failures)
        self.failures += 1

    @property
    def failure(self) -> FxError | Problem | None:
        """A copy of ``problem`` to raise; one that may pass says when the build may be tried again."""
        failure = copy(self.problem)
        if isinstance(failure, Problem) and failure.retry_after is not None:
            failure.retry_after = max(0.0, self.retry_at - time.monotonic())
        return failure

    @property
    def bytes(self) -> int:
        """About the bytes of the record of an evicted extractor: its spec, nodes, outputs and problem."""
        problem = 0 if self.problem is None else 4 * len(self.problem.detail)
        return _RECORD_BYTES + 4 * self.description.spec_bytes + 2 * OUTPUT_BYTES * len(self.outputs) + problem


_RECORD_BYTES = 8 * 1024
"""A record without anything in it, its preprocessing and its decoder."""
