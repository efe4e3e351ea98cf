"""Other input sizes of extractors over models that are built for one size, with ``fit=native``.

Each size has a runtime of its own, over a graph of the model built for that size. Its weights are the loaded ones, but
for what depends on the size. It runs on eager until it has answered enough images for a faster backend to pay; see
:meth:`service.engine.backends.upgrade.Upgrades.used`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from service.engine.memory.building import Builder
from service.engine.rows import RowShape
from service.engine.runtime import Runtime
from service.engine.tasks import background

MOST = 16
"""Maximum sizes that an extractor keeps, beside those in use."""

Size = tuple[int, int]


class InputSizes:
    """Builds sizes when they are first asked for, and drops the least recently used. For one event loop.

    Args:
        builder: builds them.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._builds: dict[tuple[Runtime, Size], asyncio.Task[Runtime]] = {}

    @asynccontextmanager
    async def use(self, runtime: Runtime, shapes: Sequence[RowShape]) -> AsyncIterator[None]:
        """Build what computes rows of ``shapes``, and keep it in memory inside an ``async with`` block:
        :meth:`Runtime.at` has it there.

        Raises:
            BadTensor: the model does not take that size.
            FxError: why it cannot be built.
        """
        async with AsyncExitStack() as stack:
            for size in _others(runtime, shapes):
                sized = await self._get(runtime, size)
                stack.enter_context(sized.in_use())
                runtime.sizes.setdefault(size, sized)  # it may have been dropped meanwhile
            yield

    async def _get(self, runtime: Runtime, size: Size) -> Runtime:
        known = runtime.sizes.get(size)
        if known is not None and (runtime.retired or not known.retired):
            return known
        build = self._builds.get((runtime, size))
        if build is None:
            build = self._builds[runtime, size] = background(self._build(runtime, size))
        return await asyncio.shield(build)

    async def _build(self, runtime: Runtime, size: Size) -> Runtime:
        try:
            sized = await self._builder.at(runtime.description, size)
        finally:
            del self._builds[runtime, size]
        if runtime.retired:
            sized.retire()
        runtime.sizes[size] = sized
        idle = sorted((s for s, one in runtime.sizes.items() if not one.busy), key=lambda s: runtime.sizes[s].last_used)
        for oldest in idle[: max(0, len(runtime.sizes) - MOST)]:
            if oldest != size:
                runtime.drop_size(oldest)
        self._builder.make_room(0)
        return sized


def _others(runtime: Runtime, shapes: Sequence[RowShape]) -> list[Size]:
    """Return the sizes of ``shapes`` that ``runtime`` itself does not take, in their order."""
    description = runtime.description
    if description.spec.fit != "native" or not description.entry.one_size:
        return []
    sizes = dict.fromkeys((shape[0][-2], shape[0][-1]) for shape in shapes)
    return [size for size in sizes if size != runtime.graph.input_size]
