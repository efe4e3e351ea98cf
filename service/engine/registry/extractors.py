"""The extractors there are: finding, building, naming and forgetting them.

An extractor costs a graph copy; the weights under it are shared, and so is the traced graph that it is a copy of. All
of them live under one memory budget, see :mod:`service.engine.registry.eviction`. An evicted extractor keeps its id,
its name and its description, and is built again by the next request for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import torch

from fxcore.errors import FxError, summarize
from fxcore.extractor import build_extractor
from service.engine.backends.upgrade import Upgrades
from service.engine.device.threads import in_pool
from service.engine.errors import ExtractorFailed, Forbidden, NameTaken, UnknownExtractor
from service.engine.record import PRECISIONS, ExtractorRecord
from service.engine.registry.deleted import Deleted
from service.engine.registry.eviction import Eviction
from service.engine.registry.forgetting import forgettable
from service.engine.registry.graphs import graph_of
from service.engine.registry.names import Names
from service.engine.registry.resolving import resolve
from service.engine.registry.transforms import steps, transformed
from service.engine.registry.weights import ModelStore
from service.garbage import exempt, tidy
from service.observability.metrics import Metrics
from service.schemas.v1 import ExtractorSpec

log = logging.getLogger("fxserve.extractors")

_REMEMBERED_SPECS = 4096


class Extractors:
    """All extractors of a service. For one event loop; what takes time runs in ``pool``.

    Args:
        models: the loaded weights.
        device: where extractors run.
        pool: the threads that trace and build.
        memory_budget: bytes that models and extractors may take; what is in use or pinned stays even above it.
        upgrades: decides what runs an extractor.
        metrics: where evictions are counted.
        allowed: the only models served; None for all.
        most_compiled: extractors that OpenVINO may run at a time.

    Attributes:
        eviction: keeps them under the memory budget.
    """

    def __init__(
        self,
        models: ModelStore,
        device: torch.device,
        pool: Executor,
        memory_budget: int,
        upgrades: Upgrades,
        metrics: Metrics,
        allowed: Sequence[str] | None = None,
        *,
        most_compiled: int,
    ) -> None:
        self._upgrades = upgrades
        self._evictions = metrics.evictions
        self._deleted = Deleted(pool)
        self._models = models
        self._device = device
        self._pool = pool
        self._allowed = None if allowed is None else frozenset(allowed)
        self._records: dict[str, ExtractorRecord] = {}
        self.eviction = Eviction(models, self._records.values(), pool, memory_budget, metrics.evictions, most_compiled)
        upgrades.on_upgrade = self.eviction.make_room
        self._names = Names()
        # The one-step route asks with the same few specs again and again: resolving those is a look-up.
        self._resolved: OrderedDict[bytes, str] = OrderedDict()

    async def get(self, spec: ExtractorSpec, build: bool = True) -> tuple[ExtractorRecord, bool]:
        """The extractor that ``spec`` describes, and whether it is new. Its build has been started, not awaited.

        Raises:
            FxError: the spec names something that does not exist or is not served, or its name is another's.
            Forbidden: there is none and ``build`` is false.
        """
        key = hashlib.sha256(spec.model_dump_json(exclude={"name"}).encode()).digest()
        record = self._records.get(self._resolved.get(key, ""))
        created = False
        if record is None:
            fresh = await in_pool(self._pool, resolve, spec, self._device, self._allowed)
            record = self._records.get(fresh.id)
            if record is None and not build:
                raise Forbidden(
                    f"there is no extractor of these nodes of {spec.model} with these weights yet, and making one "
                    "needs a key of scope admin; with one, POST /v1/extractors makes it"
                )
            if record is None:
                self._check_name(spec.name, fresh.id)
                for unused in forgettable(self._records.values(), self._names.bytes):
                    self._remove(unused)
                    self._evictions.labels("record", "unused").inc()
                record = self._records[fresh.id] = fresh
                created = True
            self._resolved[key] = record.id
            if len(self._resolved) > _REMEMBERED_SPECS:
                self._resolved.popitem(last=False)
        if spec.name is not None:
            self._check_name(spec.name, record.id)
            self._name(record, spec.name)
        self.ensure(record)
        return record, created

    def ensure(self, record: ExtractorRecord) -> None:
        """Start building ``record`` unless it is built or being built. A failed build is tried again."""
        if record.run is None and record.build is None:
            record.state = "building"
            record.problem = None
            record.build = asyncio.create_task(self._build(record))

    def known(self, id_or_name: str) -> ExtractorRecord | None:
        """The extractor of that id or name, if there is one."""
        return self._records.get(id_or_name) or self._records.get(self._names.id(id_or_name) or "")

    def find(self, id_or_name: str) -> ExtractorRecord:
        """The extractor of that id or name.

        Raises:
            UnknownExtractor: there is none. What was meant is looked for, which takes longer than finding one does.
        """
        record = self.known(id_or_name)
        if record is None:
            suggestions = self._names.near(id_or_name, reversed(self._records))
            hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; POST /v1/extractors makes one"
            raise UnknownExtractor(f"there is no extractor {id_or_name!r}{hint}", suggestions=suggestions)
        return record

    def list(self) -> list[ExtractorRecord]:
        """All extractors, in the order they were made."""
        return list(self._records.values())

    def delete(self, id_or_name: str) -> None:
        """Forget an extractor. Requests that are on their way through it end normally.

        Raises:
            UnknownExtractor: there is none of that id or name.
        """
        record = self.find(id_or_name)
        self._remove(record)
        self._upgrades.forget(record)
        shared = any(other.model_key == record.model_key for other in self._records.values())
        self._let_go(record, None if shared else "deleted")

    def unload(self, id_or_name: str) -> None:
        """Give back what an extractor holds in memory; it stays known, and the next request for it builds it again.

        Requests that are on their way through it end normally: they go on with what is given back. One that is being
        built for the first time is unloaded once that is done, as nothing could be said of it before.

        Raises:
            UnknownExtractor: there is none of that id or name.
        """
        record = self.find(id_or_name)
        if record.build is not None and not record.outputs:
            record.build.add_done_callback(lambda _: self._unload_built(record))
            return
        empty: dict[str, Any] = dict.fromkeys(("extractor", "run", "upgrade", "check", "build", "held"))
        if record.state == "building":
            empty["state"] = "ready"  # as it is while it is not in memory
        self._records[record.id] = replace(record, **empty, images=0, users=0, pinned=False)
        record.forget_sizes()
        self._upgrades.forget(record)
        others = (other for other in self._records.values() if other.model_key == record.model_key)
        loaded = any(other.run is not None or other.build is not None for other in others)
        self._let_go(record, None if loaded else "unloaded")

    def _unload_built(self, record: ExtractorRecord) -> None:
        if record.run is not None and self._records.get(record.id) is record:
            self.unload(record.id)

    def close(self) -> None:
        """Make no more room."""
        self._deleted.close()
        self.eviction.close()

    async def _build(self, record: ExtractorRecord) -> None:
        """Load the weights and build the extractor; afterwards the record is ready or failed."""
        try:
            if record.model_key not in self._models.loaded():
                # An estimate, so that what is evicted is gone before the weights are there.
                default = record.entry.default_weights
                params = record.entry.weights_info(default).num_params if default is not None else 0
                self.eviction.make_room(params * PRECISIONS[record.spec.precision].itemsize)
            model = await self._models.get(record.entry, record.model_key)
            record.held = graph = await in_pool(self._pool, graph_of, record)
            extractor = await in_pool(
                self._pool,
                build_extractor,
                graph,
                model.module,
                record.return_nodes,
                record.dtype,
            )
            original: Callable[..., Any] = extractor.module
            if record.spec.transforms:
                extractor, record.transformed, original = await in_pool(
                    self._pool, transformed, record, graph, extractor, steps(record.spec)
                )
            record.outputs = extractor.outputs
            record.extractor = extractor
            await self._upgrades.first(record, extractor, original, self._pool)
            record.state = "ready"
        except FxError as problem:
            record.state, record.problem = "failed", _kept(problem)
        except Exception as error:
            log.exception("building extractor %s over %s failed", record.id, record.spec.model)
            record.state = "failed"
            record.problem = ExtractorFailed(
                f"extractor {record.id} over {record.spec.model} could not be built: {summarize(error)}",
                problem={"error": summarize(error)},
            )
        finally:
            if record.state == "failed":
                record.held = record.extractor = None
            record.build = None
            record.last_used = time.monotonic()
        if record.state == "ready":
            self._pool.submit(exempt)
        self.eviction.make_room()

    def _remove(self, record: ExtractorRecord) -> None:
        del self._records[record.id]
        self._names.forget(record.id)

    def _let_go(self, record: ExtractorRecord, reason: str | None) -> None:
        """Free what ``record``, which is known no more, holds; its weights as well where there is a ``reason`` to."""
        if reason is not None:
            self.eviction.drop(record.model_key, reason)
        if reason is not None and not record.active:
            self._pool.submit(tidy)
        else:
            self._deleted.add(record)

    def _name(self, record: ExtractorRecord, name: str) -> None:
        before = self.known(name)
        self._names.give(name, record.id)
        record.name = name
        if before is not None and before is not record:
            before.name = self._names.last(before.id)

    def _check_name(self, name: str | None, id: str) -> None:
        """Whether the extractor ``id`` may have ``name``: what failed gives up its names to whoever asks for them.

        Raises:
            NameTaken: it may not.
        """
        owner = self.known(name) if name is not None else None
        if owner is not None and owner.id != id and (owner.state != "failed" or owner.id == name):
            raise NameTaken(
                f"the name {name!r} is taken by extractor {owner.id}; choose another name or delete that extractor",
                name=name,
                extractor=owner.id,
            )


def _kept(problem: FxError) -> FxError:
    """``problem`` without where it came from: frames whose variables are a model and what was built over it."""
    problem.__cause__ = problem.__context__ = None
    return problem.with_traceback(None)
