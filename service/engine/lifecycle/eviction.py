"""Eviction: weights, built extractors, traced graphs and projection matrices share one memory budget.

The least recently used go first, in this order: projection matrices that no request has used for a while; whole models
with their extractors; if every model is in use, single extractors; variants of extractors in use; graphs of models that
are not in memory; projection matrices in use, which take a second to make again. Idle graphs are small and slow to
trace again, but they go first if they exceed their share of the budget. An evicted extractor keeps its id, name and
description, and is built again by its next request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Literal

from prometheus_client import Counter

from fxcore.graph.model_graph import forget_graph
from service.engine.description import ModelKey
from service.engine.memory.graphs import graph_bytes, idle_graphs
from service.engine.memory.projections import Projections
from service.engine.memory.weights import ModelStore
from service.engine.placement import BUSY_SECONDS, CompiledLimits
from service.engine.record import ExtractorRecord
from service.engine.runtime.collecting import Collector
from service.engine.runtime.ledger import Ledger
from service.engine.runtime.runtime import Runtime

log = logging.getLogger("fxserve.eviction")

GRAPH_SHARE = 1 / 4
"""Maximum share of the memory budget for graphs of models that are not in memory."""

_TRY_AGAIN_SECONDS = 1.0


class Eviction:
    """Keeps models, extractors and graphs under a memory budget. For one event loop.

    Args:
        models: the loaded weights.
        records: a view of all extractors.
        collector: garbage-collects evicted runtimes.
        ledger: counts the storages in memory.
        memory_budget: maximum bytes of models and extractors. Those in use or pinned are kept even above it.
        evictions: counts evictions by kind and reason.
        compiled: limits on the number of compiled OpenVINO extractors.
        projections: the projection matrices.
    """

    def __init__(
        self,
        models: ModelStore,
        records: Collection[ExtractorRecord],
        collector: Collector,
        ledger: Ledger,
        memory_budget: int,
        evictions: Counter,
        compiled: CompiledLimits,
        projections: Projections,
    ) -> None:
        self._models = models
        self._records = records
        self._collector = collector
        self._ledger = ledger
        self._memory_budget = memory_budget
        self._evictions = evictions
        self._compiled = compiled
        self._projections = projections
        self._later: asyncio.TimerHandle | None = None

    def bytes(self) -> int:
        """Return the bytes of all loaded models, built extractors, traced graphs and projection matrices."""
        models = sum(model.bytes for model in self._models.loaded().values())
        own = sum(record.runtime.own_bytes for record in self._records if record.runtime is not None)
        graphs = graph_bytes(one.extractor.graph for _, one in self._runtimes())
        return models + self._ledger.bytes + own + graphs + self._projections.bytes()

    def make_room(self, wanted: int = 0) -> None:
        """Evict the least recently used until ``wanted`` more bytes fit into the budget.

        If too much is in use, retry later, because there may be no further build to trigger it.
        """
        evicted = set()
        while self.bytes() + wanted > self._memory_budget:
            kind = self._evict_one()
            if kind is None:
                log.info("%d bytes are in use beside %d wanted, over the memory budget", self.bytes(), wanted)
                if self._later is None:
                    self._later = asyncio.get_running_loop().call_later(_TRY_AGAIN_SECONDS, self._make_room_later)
                break
            self._evictions.labels(kind, "memory_budget").inc()
            evicted.add(kind)
        if self._evict_compiled():
            evicted.add("extractor")
        if evicted - {"graph", "projection"}:
            self._collector.now()

    def forget_weights(self, key: ModelKey, reason: str) -> None:
        """Forget weights that no extractor in memory uses, and count that."""
        if self._models.forget(key):
            self._evictions.labels("weights", reason).inc()

    def may_compile(self) -> bool:
        """Return whether one more extractor may be compiled: few are, or one that is not used can be evicted for it."""
        compiled = [(record, one) for record, one in self._runtimes() if one.backend == "openvino" or one.searched]
        unused = time.monotonic() - BUSY_SECONDS
        evictable = (one for record, one in compiled if not record.pinned_or_active)
        return len(compiled) < self._compiled.usual or any(one.last_used < unused for one in evictable)

    def close(self) -> None:
        """Stop evicting."""
        if self._later is not None:
            self._later.cancel()

    def _evict_compiled(self) -> bool:
        """Evict compiled OpenVINO extractors down to the limits. Return whether any was evicted."""
        compiled = [(record, one) for record, one in self._runtimes() if one.backend == "openvino"]
        idle = sorted(
            ((record, one) for record, one in compiled if not _in_use(record, one)), key=lambda pair: pair[1].last_used
        )
        unused = time.monotonic() - BUSY_SECONDS
        over = [
            (record, one)
            for place, (record, one) in enumerate(idle)
            if place < len(compiled) - self._compiled.most
            or (place < len(compiled) - self._compiled.usual and one.last_used < unused)
        ]
        for record, one in over:
            if record.runtime is None:  # it was just retired with its variants
                continue
            if one is record.runtime:
                record.retire()
                self._evictions.labels("extractor", "threads").inc()
            else:
                record.runtime.retire_variant(one)
                self._evictions.labels("variant", "threads").inc()
        return bool(over)

    def _runtimes(self) -> list[tuple[ExtractorRecord, Runtime]]:
        """Return all runtimes, including variants, each with its record."""
        built = ((record, record.runtime) for record in self._records if record.runtime is not None)
        return [(record, one) for record, runtime in built for one in runtime.all]

    def _evict_one(self) -> Literal["graph", "weights", "extractor", "variant", "projection"] | None:
        """Evict the first object in the order given in the module's docstring.

        Return its kind; None if everything is in use.
        """
        graphs = idle_graphs(one.extractor.graph for _, one in self._runtimes())
        if sum(graph.bytes for graph in graphs) > GRAPH_SHARE * self._memory_budget:
            forget_graph(graphs[0])
            return "graph"
        if self._projections.forget_oldest(busy=False):
            return "projection"
        over: defaultdict[ModelKey, list[ExtractorRecord]] = defaultdict(list)
        for record in self._records:
            if record.runtime is not None or record.build is not None:
                over[record.description.model_key].append(record)
        idle = [key for key in self._models.loaded() if not any(record.pinned_or_active for record in over[key])]
        if idle:
            key = min(idle, key=lambda key: max((record.last_used for record in over[key]), default=0.0))
            for record in over[key]:
                record.retire()
                self._evictions.labels("extractor", "memory_budget").inc()
            self._models.forget(key)
            log.info("evicted the weights of %s %s in %s and %d extractors", *key, len(over[key]))
            return "weights"
        loose = [record for records in over.values() for record in records if not record.pinned_or_active]
        if loose:
            min(loose, key=lambda record: record.last_used).retire()
            return "extractor"
        variants = [(r, one) for r, one in self._runtimes() if one is not r.runtime and not _in_use(r, one)]
        if variants:
            record, oldest = min(variants, key=lambda pair: pair[1].last_used)
            assert record.runtime is not None
            record.runtime.retire_variant(oldest)
            return "variant"
        if graphs:
            forget_graph(graphs[0])
            return "graph"
        return "projection" if self._projections.forget_oldest(busy=True) else None

    def _make_room_later(self) -> None:
        self._later = None
        self.make_room()


def _in_use(record: ExtractorRecord, runtime: Runtime) -> bool:
    """Return whether ``runtime``, that of ``record`` or one of its variants, must stay in memory now."""
    return record.pinned_or_active if runtime is record.runtime else runtime.busy
