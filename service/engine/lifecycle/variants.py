"""Variants of extractors, for other input sizes and for edits.

Input sizes other than the extractor's own occur with ``fit=native``; models built for one size need a variant for each.
Requests that edit inner values need a variant with the factors as inputs.

Each variant has its own runtime. It shares the loaded weights, except for those that depend on the size. It runs on
eager until it has processed enough images for a faster backend to pay off; see
:meth:`service.engine.backends.upgrades.Upgrades.used`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from contextlib import ExitStack
from functools import partial

from service.engine.lifecycle.building import Builder
from service.engine.rows.shapes import RowShape
from service.engine.runtime.runtime import Runtime, Variant
from service.engine.tasks import SingleFlight
from service.problems import AdmissionFull

MOST = 16
"""Maximum variants per extractor, not counting those in use."""


class Variants:
    """Builds variants on demand, and retires the least recently used. For one event loop.

    Args:
        builder: builds them.
        make_room: evicts until the memory budget is kept.
    """

    def __init__(self, builder: Builder, make_room: Callable[[], object]) -> None:
        self._builder = builder
        self._make_room = make_room
        self._builds = SingleFlight[tuple[Runtime, Variant], Runtime]("build", keep=False)  # the runtimes have them
        self._waiting: dict[tuple[Runtime, Variant], list[ExitStack]] = {}

    async def hold(
        self, stack: ExitStack, runtime: Runtime, edited: Set[str], shapes: Iterable[RowShape]
    ) -> tuple[Runtime, dict[RowShape, Runtime]]:
        """Return ``runtime`` or its variants that a request needs, kept in memory until ``stack`` is closed.

        Args:
            edited: exact names of the nodes that the request edits.
            shapes: the shapes of its rows.

        Returns:
            The runtime that edits these nodes, and the one that does so for rows of each shape.

        Raises:
            BadEdit: a node cannot be edited.
            BadTensor: the model does not accept that size.
            AdmissionFull: too many other variants are being built.
            FxError: a variant cannot be built.
        """
        if edited:
            runtime = await self._hold(stack, runtime, tuple(sorted(edited)))
        runtimes = dict.fromkeys(shapes, runtime)
        description = runtime.description
        if description.spec.fit == "native" and description.entry.one_size:
            for shape in runtimes:
                size = shape[0][-2], shape[0][-1]
                if size != runtime.extractor.graph.input_size:
                    runtimes[shape] = await self._hold(stack, runtime, size)
        return runtime, runtimes

    async def _hold(self, stack: ExitStack, runtime: Runtime, which: Variant) -> Runtime:
        known = runtime.variants.get(which)
        if known is not None and (runtime.retired or known.busy or not known.retired):
            stack.enter_context(known.in_use())
            return known
        key, making = (runtime, which), self._builds.making
        if key not in making and sum(other is runtime for other, _ in making) >= MOST:
            raise AdmissionFull(f"{MOST} other sizes or edits of this extractor are being prepared", 1.0)
        waiting = self._waiting.setdefault(key, [])
        waiting.append(stack)
        try:
            return await self._builds.get(key, partial(self._build, runtime, which))
        finally:
            waiting.remove(stack)

    async def _build(self, runtime: Runtime, which: Variant) -> Runtime:
        try:
            variant = await self._builder.variant(runtime, which)
        finally:
            waiting = self._waiting.pop((runtime, which))
        for stack in waiting:  # otherwise it could be evicted before they go on
            stack.enter_context(variant.in_use())
        if runtime.retired:
            variant.retire()
        kept = runtime.variants = {**runtime.variants, which: variant}
        with variant.in_use():  # so that making room does not evict it
            idle = sorted((one for one in kept if not kept[one].busy), key=lambda one: kept[one].last_used)
            for oldest in idle[: max(0, len(kept) - MOST)]:
                runtime.retire_variant(kept[oldest])
            self._make_room()
        return variant
