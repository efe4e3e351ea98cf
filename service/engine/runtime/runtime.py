"""The runtime of an extractor: its built form in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxcore.backends import Lowered
from fxcore.errors import BadTensor, summarize
from fxcore.extractor import Extractor
from fxcore.models.user_models import UserEntry
from service.engine.description import Description
from service.engine.errors import failure
from service.engine.runtime.candidate import Candidate, report
from service.engine.runtime.ledger import Ledger
from service.engine.runtime.pace import Pace
from service.engine.runtime.row_sizes import RowSizes
from service.engine.runtime.transformation import Transformed
from service.problems import ComputeFailed, Problem

Variant = tuple[int, ...] | tuple[str, ...]
"""Height and width, or the names of edited nodes in order."""

NODE_BYTES = 3 * 1024
"""Approximate bytes of the Python objects for one node of an extractor's graph."""


class Runtime:
    """A built extractor. Only the event loop changes it, except for ``pace`` and ``seconds_per_byte``.

    Args:
        description: the extractor's description.
        extractor: pruned from the model's graph and transformed.
        transformed: the report of its transforms, if it has any.
        ledger: counts its bytes while it is in memory.
        on_idle: called once it is retired and no longer in use.
        model: the loaded model, from which its variants are built.
        pace: the speed of the model, shared with its other runtimes.
        held: bytes by address of the model's storages that the loaded model does not have: for a model built for
            another size, the resampled weights.

    Attributes:
        run: computes a batch; called with the model's inputs in order, on the device. The worker reads it once per
            batch.
        serving: the candidate that ``run`` belongs to.
        candidates: the serving one, those before it, and those that may replace it, in order.
        layers: the accuracy loss of its layers in int8, the largest first; None until it is known.
        upgrade: the task that measures the backend and searches for a faster one; see
            :mod:`service.engine.backends.upgrade`.
        checked: set once the first backend's values were compared, or could not be.
        wanted: set to request the search for a faster backend.
        images: number of images it has processed.
        seconds_per_byte: seconds of a batch per predicted byte of its rows, according to the last ones; None before
            the first. Set by the worker.
        last_used: when it was last used, on the clock of ``time.monotonic()``.
        retired: whether it was evicted, unloaded or deleted, or the service closes. In-flight requests finish; no new
            background work starts.
        variants: runtimes for other input sizes, by height and width, if its model is built for one size, and for
            edited rows, by the names of the edited nodes; see :mod:`service.engine.lifecycle.variants`. Replaced and
            never changed, since other threads read it.
        sizes: predicts the sizes of its rows.
    """

    run: Lowered
    serving: Candidate

    def __init__(
        self,
        description: Description,
        extractor: Extractor,
        transformed: Transformed | None,
        ledger: Ledger,
        on_idle: Callable[[], object],
        model: nn.Module,
        pace: Pace,
        held: Mapping[int, int],
    ) -> None:
        self.description = description
        self.extractor = extractor
        self.transformed = transformed
        self.candidates: list[Candidate] = []
        self.layers: list[dict[str, Any]] | None = None
        self.upgrade: asyncio.Task[None] | None = None
        self.checked = asyncio.Event()
        self.wanted = asyncio.Event()
        self.images = 0
        self.seconds_per_byte: float | None = None
        self.last_used = time.monotonic()
        self.retired = False
        self.variants: dict[Variant, Runtime] = {}
        self.sizes = RowSizes(description, extractor)
        self.model = model
        self.pace = pace
        self._ledger = ledger
        self._on_idle = on_idle
        self._held = held
        self._counted: Mapping[int, int] = {}
        self._users = 0

    def failure(self, error: BaseException, shape: Sequence[tuple[int, ...]]) -> BadTensor | Problem:
        """Return the error for a request on whose rows of ``shape`` the model failed with ``error``.

        An operator's own model that runs at its usual size fails at another because of that size, unless the device
        failed. Shapes that others do not accept are refused before they run, so their failures have other causes.
        """
        found = failure(error)
        graph = self.extractor.graph
        size = graph.preprocessing.nominal_size()
        usual = graph.input_size == size and list(shape) == self.description.usual_shapes()
        own = isinstance(self.description.entry, UserEntry)
        if usual or not own or not isinstance(found, ComputeFailed) or isinstance(error, torch.AcceleratorError):
            return found
        *shown, expected = (" x ".join(map(str, dims)) for dims in (*shape, size))
        return BadTensor(
            f"{self.description.of} failed on an input of {', '.join(shown)}: {summarize(error)}; the usual size of "
            f"{self.description.spec.model} is {expected}"
        )

    def retire_variant(self, variant: Runtime) -> None:
        """Retire one of its variants, or one of theirs."""
        kept = {which: one for which, one in self.variants.items() if one is not variant}
        if len(kept) < len(self.variants):
            self.variants = kept
            variant.retire()
        for one in kept.values():
            one.retire_variant(variant)

    @property
    def all(self) -> list[Runtime]:
        """Itself, its variants, and theirs."""
        return [self, *(one for variant in self.variants.values() for one in variant.all)]

    def serve(self, run: Lowered, candidate: Candidate) -> None:
        """Make ``run`` of ``candidate`` compute all batches from now on."""
        self.run, self.serving = run, candidate
        self._count({} if self.retired else {**self._held, **run.storages()})

    def retire(self) -> None:
        """Stop its background task and stop counting its bytes, and those of its variants."""
        self.retired = True
        if self.upgrade is not None:
            self.upgrade.cancel()
        self.checked.set()  # release waiters: the check will not happen
        self._count({})
        for variant in self.variants.values():
            variant.retire()
        if not self._users:
            self._on_idle()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it in memory inside a ``with`` block."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.last_used = time.monotonic()
            if self.retired and not self._users:
                self._on_idle()

    @property
    def backend(self) -> str:
        return self.serving.backend

    @property
    def checks(self) -> dict[str, Any]:
        """How far its values are from the model's own."""
        measured = report(self.description.spec.precision, self.serving, self.candidates)
        if self.layers is not None:
            measured["layers"] = self.layers
        return measured if self.transformed is None else self.transformed.checks(measured)

    @property
    def searched(self) -> bool:
        """Whether the search for a faster backend is running."""
        return self.wanted.is_set() and self.upgrade is not None and not self.upgrade.done()

    @property
    def busy(self) -> bool:
        """Whether requests or a search for a faster backend are using it."""
        return self._users > 0

    @property
    def own_bytes(self) -> int:
        """Bytes that the ledger does not count: Python objects, and memory that its backend has allocated since."""
        nodes = self.extractor.nodes
        others = sum(variant.own_bytes for variant in self.variants.values())
        return nodes * NODE_BYTES + self.sizes.bytes + self.run.grown + others

    def _count(self, storages: Mapping[int, int]) -> None:
        self._ledger.add(storages)
        self._ledger.remove(self._counted)
        self._counted = storages
