"""The decision when to search for a faster backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from service.engine.backends.checks import PassFailed, Reference, check_photographs
from service.engine.backends.choice import faster_backends
from service.engine.backends.upgrade import Tools
from service.engine.description import ModelKey
from service.engine.record import ExtractorRecord
from service.engine.runtime.runtime import Runtime
from service.problems import NotReady

WORTH_A_COPY = 16
"""Number of images that an extractor must process before it gets a second lowered copy of weights that another
extractor has already lowered. The same number applies to each of its variants."""

WORTH_SECONDS = 30.0
"""Seconds of computing on eager above which a search pays off for a single run. On two cores a search takes 10 seconds
for mobilenet_v3_small and 40 for swin_t, and the backend it finds needs a third to three quarters of eager's time."""

_FULL_SECONDS = 1.0
"""Seconds between two checks whether one more compiled extractor is allowed."""


class Upgrades:
    """Decides when extractors are upgraded. For one event loop.

    Args:
        tools: the resources shared by all upgrades.
        records: a view of all extractors.
        may_compile: returns whether one more extractor may be compiled.
    """

    def __init__(self, tools: Tools, records: Collection[ExtractorRecord], may_compile: Callable[[], bool]) -> None:
        self._tools = tools
        self._records = records
        self._may_compile = may_compile
        self._full_until = 0.0  # on the clock of time.monotonic(); saves counting the compiled ones on every request

    def used(self, runtime: Runtime, images: int, variant: bool) -> None:
        """Count images that ``runtime``, perhaps a variant, processed, and start the search for a faster backend.

        The extractor and each of its variants are upgraded separately, once they have processed enough images and if
        one more compiled extractor is allowed.
        """
        runtime.images += images
        if not self._tools.settings.lowering or runtime.wanted.is_set():
            return
        if runtime.images < WORTH_A_COPY and (variant or self._has_copy(runtime.description.model_key)):
            return
        now = time.monotonic()
        if now < self._full_until:
            return
        if self._may_compile():
            self.improve(runtime)
        else:
            self._full_until = now + _FULL_SECONDS

    async def pays(self, runtime: Runtime, images: Callable[[], int]) -> bool:
        """Return whether a search saves time in a run.

        It does if an earlier search found a faster backend, or if eager needs more than :data:`WORTH_SECONDS`.

        Args:
            images: counts the images of the run, which may take long. Called in a thread, and only if it matters.
        """
        tools, description, eager = self._tools, runtime.description, runtime.run
        faster = faster_backends(description)
        if not faster:
            return False
        for backend in faster:
            if await asyncio.to_thread(tools.verdicts.read, description, backend.name) is not None:
                return True
        rows = await asyncio.to_thread(check_photographs, description, runtime.extractor)
        reference = Reference(eager, rows, description.spec.precision)
        try:
            seconds = await tools.trials.seconds_per_row(reference, eager)
        except (PassFailed, NotReady):  # NotReady: too little memory
            return False
        return seconds * await asyncio.to_thread(images) > WORTH_SECONDS

    def improve(self, runtime: Runtime) -> asyncio.Task[None] | None:
        """Request a search for a faster backend, unless there is none or ``runtime`` is retired.

        Returns the task that ends with the search; None if no search was ever requested.
        """
        if not runtime.retired and faster_backends(runtime.description):
            runtime.wanted.set()
        return runtime.upgrade if runtime.wanted.is_set() else None

    def _has_copy(self, key: ModelKey) -> bool:
        """Return whether an extractor holds a lowered copy of the weights ``key``, or will soon."""
        over = (record.runtime for record in self._records if record.description.model_key == key)
        return any(r is not None and r.wanted.is_set() and (r.backend != "eager" or r.searched) for r in over)
