"""Wires the engine together and manages its lifecycle.

Its methods run on one event loop and never block it: slow work runs in one of its thread pools.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TypeVar

import PIL.Image
import torch
from torch import Tensor

from fxcore.edits import Edit
from fxcore.errors import FxError, summarize
from fxcore.memory import use_one_heap
from service.engine.backends.trials import Trials
from service.engine.backends.upgrade import Tools
from service.engine.backends.upgrades import Upgrades
from service.engine.backends.verdicts import Verdicts
from service.engine.device.queue import Queue
from service.engine.device.worker import DeviceWorker
from service.engine.extractors.extractors import Extractors
from service.engine.extractors.resolving import Resolver, spec_to_preload
from service.engine.extractors.sharing import Sharing
from service.engine.extractors.store import Store
from service.engine.lifecycle.building import Builder
from service.engine.lifecycle.eviction import Eviction
from service.engine.lifecycle.records import Records
from service.engine.lifecycle.runtimes import Runtimes
from service.engine.lifecycle.variants import Variants
from service.engine.memory.projections import Projections
from service.engine.memory.weights import ModelStore
from service.engine.models.own_models import register_models, warn_unknown_models
from service.engine.options import FeatureOptions, FeatureResult
from service.engine.placement import compiled_limits, pick_device
from service.engine.record import ExtractorRecord, retry_seconds
from service.engine.requests.admission.admission import SERVICE, Admission, Reservation
from service.engine.requests.admission.in_flight import InFlight
from service.engine.requests.attributing import Attributed, Question, attribute
from service.engine.requests.pipeline import Pipeline
from service.engine.requests.plan.plan import Inputs
from service.engine.requests.profiling import Measured, profiled
from service.engine.runtime.collecting import Collector
from service.engine.runtime.ledger import Ledger
from service.engine.runtime.runtime import Runtime
from service.engine.tasks import background
from service.engine.threads import Threads, in_pool, thread_trouble
from service.garbage import collect_rarely
from service.observability.metrics import Metrics
from service.problems import Draining, NotReady, Problem
from service.schemas.regions import GivenRegions
from service.settings import Settings

log = logging.getLogger("fxserve.engine")

T = TypeVar("T")

HUNG_SECONDS = 120.0
"""Seconds beyond the request timeout after which a batch is considered to hang for good."""


class Engine:
    """Extractors and the machinery that runs them.

    Create it anywhere; use it on one event loop, between :meth:`start` and :meth:`close`.

    Args:
        settings: the service's settings.

    Attributes:
        admission: limits the work in the service at a time.
        threads: its threads and thread pools.
        models: the loaded weights.
        records: the extractors that this process knows.
        extractors: makes, finds and deletes extractors.
        runtimes: builds, lends and frees their runtimes.
        eviction: keeps the memory budget.
        in_flight: accepted requests: :meth:`drain` waits for ``with`` blocks over it.
        draining: whether the service is shutting down and no further request may start.
        preload_failed: whether the last attempt to preload an extractor of the settings failed; :meth:`readiness` says
            why.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = metrics = Metrics()
        self.device = pick_device(settings.device)
        # Turns for four batches: one being computed, one waiting for it, one being decoded, and one being answered and
        # replaced.
        self.admission = Admission(settings.max_inflight, settings.max_inflight_bytes, 4 * settings.max_batch)
        self._queue = Queue(settings.max_batch, settings.max_batch_bytes)
        self._worker = DeviceWorker(self.device, self._queue, settings.compute_threads, self.metrics)
        self.threads = threads = Threads(settings, self.device)
        self.models = ModelStore(self.device, settings.weights_dir, threads.builders, threads.downloads)
        self.records = Records(metrics.evictions)
        records, budget = self.records.values(), settings.memory_budget
        collector, ledger = Collector(threads.builders), Ledger()
        # Projections and eviction need each other.
        projections = Projections(self.device, threads.builders, budget, lambda: self.eviction.make_room())
        limits = compiled_limits(settings.compute_threads)
        self.eviction = Eviction(
            self.models, records, collector, ledger, budget, metrics.evictions, limits, projections
        )
        self._tools = Tools(
            settings,
            Trials(self._queue, settings.max_batch),
            Verdicts(settings),
            threads.foreground,
            threads.background,
            self.eviction.make_room,
            collector,
        )
        self._upgrades = Upgrades(self._tools, records, self.eviction.may_compile)
        builder = Builder(self.models, self._tools, threads.builders, ledger)
        self.runtimes = Runtimes(self.records, builder, self.eviction, collector)
        resolver = Resolver(self.records, self.device, threads.builders, settings)
        store = None if settings.extractors is None else Store(settings.extractors, settings.max_stored_extractors)
        self._sharing = None if store is None else Sharing(store, self.metrics)
        self.extractors = Extractors(self.records, resolver, self.runtimes, self._sharing)
        self._pipeline = Pipeline(
            settings,
            self.admission,
            self._queue,
            threads,
            self._upgrades,
            projections,
            Variants(builder, self.eviction.make_room),
        )
        self._preloading: asyncio.Task[None] | None = None
        self._preload_trouble: str | None = "the service is starting"
        self.preload_failed = False
        self.draining = False
        self.in_flight = InFlight()

    async def start(self) -> None:
        """Start the device worker and the preloading.

        The operator's own models are in the catalog when it returns. :meth:`readiness` reports when preloading is done.
        """
        PIL.Image.MAX_IMAGE_PIXELS = None  # process-wide; FXSERVE_MAX_PIXELS is the limit
        use_one_heap()
        collect_rarely()
        if self.device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = False  # no TF32 in convolutions, as in matmuls by default
        self.threads.start()
        await in_pool(self.threads.builders, register_models, self.settings.models_dir, True)
        await in_pool(self.threads.builders, warn_unknown_models, self.settings.models or ())
        self._worker.start()
        if self._sharing is not None:
            await self._sharing.start()
        self._preloading = background(self._preload(), "preload")

    async def drain(self, grace: float | None = None) -> None:
        """Wait until all accepted requests are answered; callers check ``draining`` and start no others.

        Args:
            grace: seconds after which the remaining requests are answered with an error; None: ``grace_period`` of the
                settings.
        """
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.grace_period if grace is None else grace):
                await self.in_flight.wait_idle()
        except TimeoutError:
            log.warning("closing with %d requests unfinished", self.in_flight.count)
            self._queue.close(Draining())
            self._worker.abandon(Draining())

    async def close(self, grace: float | None = None) -> None:
        """Drain, then stop all threads."""
        if self._preloading is not None:
            self._preloading.cancel()
        await self.drain(grace)
        self._tools.cancel()
        self.threads.stop_compiling()
        if self._sharing is not None:
            self._sharing.close()
        self.runtimes.close()
        await asyncio.to_thread(self._worker.stop, 2.0)
        self.threads.close()

    @property
    def max_response_bytes(self) -> int:
        """Maximum bytes of the tensors in a response."""
        return min(self.settings.max_response_bytes, self.admission.max_bytes)

    def readiness(self) -> tuple[bool, str]:
        """Return whether requests can be served now, and the reason if not."""
        if self.draining:
            return False, "the service is shutting down"
        of_store = None if self._sharing is None else self._sharing.error()
        unread = of_store if self._sharing is not None and not self._sharing.was_read else None
        trouble = unread or self._preload_trouble or self.device_trouble() or thread_trouble()
        if trouble is not None:
            return False, trouble
        # If the store is down, no replica can reach it: serving the extractors in memory is better than serving
        # nothing.
        return True, "ready" if of_store is None else f"ready with what is in memory: {of_store}"

    def device_trouble(self) -> str | None:
        """Return why the device worker does not respond: it hangs, or died and could not be replaced.

        None if it responds.
        """
        return self._worker.trouble(self.settings.request_timeout)

    def device_lost(self) -> str | None:
        """Return why this process cannot recover: its device is lost or hangs for good. None if it can."""
        return self._worker.lost or self._worker.hang(self.settings.request_timeout + HUNG_SECONDS)

    def sample(self) -> None:
        """Update the gauges."""
        metrics = self.metrics
        metrics.ready.set(self.readiness()[0])
        metrics.inflight_requests.set(self.admission.requests)
        metrics.inflight_bytes.set(self.admission.bytes)
        metrics.queue_size.set(len(self._queue))
        metrics.tasks.set(len(asyncio.all_tasks()))
        metrics.models_loaded.set(len(self.models.loaded()))
        metrics.memory_bytes.set(self.eviction.bytes())
        metrics.memory_budget_bytes.set(self.settings.memory_budget)
        states = Counter("evicted" if r.phase is None else r.state for r in self.records.list())
        for state in ("building", "ready", "failed", "evicted"):
            metrics.extractors.labels(state).set(states[state])
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a lost device raises here too; keep the other metrics
                self._sample_gpu()

    def _sample_gpu(self) -> None:
        metrics, name = self.metrics, str(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        metrics.gpu_memory_allocated_bytes.labels(name).set(torch.cuda.memory_allocated(self.device))
        metrics.gpu_memory_reserved_bytes.labels(name).set(torch.cuda.memory_reserved(self.device))
        metrics.gpu_memory_used_bytes.labels(name).set(total - free)
        metrics.gpu_memory_total_bytes.labels(name).set(total)

    async def profile(self, runtime: Runtime) -> Measured:
        """Measure time and memory of each node of an extractor, between requests."""
        return await profiled(runtime, self._queue)

    async def settle(self, runtime: Runtime, images: Callable[[], int] | None = None) -> None:
        """Wait until ``runtime`` runs on the fastest backend found for it.

        Args:
            images: counts the images to compute; skip a search that would take longer than it saves.
        """
        if images is not None and not await self._upgrades.pays(runtime, images):
            return
        search = self._upgrades.improve(runtime)
        if search is not None:
            await asyncio.wait({search})

    async def features(
        self,
        record: ExtractorRecord,
        images: Inputs,
        options: FeatureOptions | None = None,
        regions: GivenRegions | None = None,
        reservation: Reservation | None = None,
        edits: Sequence[Edit] = (),
        deadline: float = math.inf,
    ) -> FeatureResult:
        """Compute the outputs of an extractor. Either all rows are returned, or the request fails as a whole.

        Cancel the call at the deadline, which drops work that has not started.

        Args:
            record: the extractor. If it is being built or was evicted, the call waits for its build.
            images: encoded images, or tensors by model input name: floating and preprocessed ``[N, C, H, W]``, or uint8
                images ``[N, H, W, C]``.
            options: how to process the outputs.
            regions: the image regions to pool, as :meth:`FeatureOptions.check_regions` accepts them.
            reservation: the request's client and the bytes it already holds; the bytes of its response are added until
                it is sent. None for a request of the service itself.
            edits: edits of inner values, in order, if :func:`~service.engine.requests.plan.edits.check_editable` allows
                them.
            deadline: when the caller will cancel it, on the clock of ``time.monotonic()``.

        Raises:
            BadEdit: an edit cannot be applied; ``extra["edit"]`` is its index.
            BadImage, BadBox, BadPoint, BadMask, ImageTooLarge, BadTensor: for the first invalid image;
                ``extra["index"]`` is its index.
            AdmissionFull, RequestTooLarge, ResponseTooLarge: raised before anything is decoded.
            DeadlineExceeded: likewise, if computing a row would take several times as long as until the deadline.
            Draining, NotReady, OutOfMemory, ComputeFailed: see their docstrings.
            FxError: the error of the extractor's build.
        """
        options = options or FeatureOptions()
        if (trouble := self.device_trouble()) is not None:
            raise NotReady(trouble)
        client = SERVICE if reservation is None else reservation.client
        with self.admission.enter(client, reservation) as ticket:
            runtime = record.runtime or await self.runtimes.load(record)
            with runtime.in_use():
                return await self._pipeline.compute(runtime, images, regions, options, ticket, edits, deadline)

    async def attribute(
        self,
        record: ExtractorRecord,
        values: Mapping[str, Tensor],
        asked: Question,
        reservation: Reservation,
        deadline: float = math.inf,
    ) -> Attributed:
        """Attribute the result of an extractor that begins at inner nodes to one of its inputs.

        See :func:`service.engine.requests.attributing.attribute`.
        """
        if (trouble := self.device_trouble()) is not None:
            raise NotReady(trouble)
        with self.admission.enter(reservation.client, reservation) as ticket:
            runtime = await self.runtimes.load(record)
            with runtime.in_use():
                # Half of the memory in flight, since the values and the response need some, too.
                limit = min(self._queue.max_bytes, self.admission.max_bytes // 2)
                limits = limit, self.max_response_bytes
                return await attribute(runtime, values, asked, self._queue, ticket, *limits, deadline)

    def run_in_encoder(self, function: Callable[..., T], *args: object) -> Awaitable[T]:
        """Run ``function(*args)`` in the pool that encodes responses."""
        return in_pool(self.threads.encoders, function, *args)

    async def _preload(self) -> None:
        """Preload the extractors of the settings, retrying each until it succeeds.

        The missing piece may appear later: weights that a hub could not serve, a file, memory.
        """
        for text in self.settings.preload:
            self._preload_trouble = f"preloading {text}"
            record: ExtractorRecord | None = None
            for attempt in count():
                try:
                    if record is None or not record.deleted or self.records.get(record.id) is not None:
                        spec = await in_pool(self.threads.builders, spec_to_preload, text)
                        record = await self.extractors.preload(spec)
                    if record is None or record.deleted:
                        log.warning("%s is not preloaded: it was deleted; a POST makes it again", text)
                    else:
                        await self._warm_up(record)
                    break
                except Exception as error:
                    # Other errors are bugs: log their traceback.
                    wrong = isinstance(error, FxError | Problem | ValueError)
                    self._preload_trouble = f"preloading {text} failed: {error if wrong else summarize(error)}"
                    self.preload_failed = True
                    seconds = retry_seconds(attempt)
                    exc_info = None if wrong or attempt else error
                    log.error("%s; it is tried again in %.0f s", self._preload_trouble, seconds, exc_info=exc_info)
                    await asyncio.sleep(seconds)
            self.preload_failed = False
        self._preload_trouble = None

    async def _warm_up(self, record: ExtractorRecord) -> None:
        """Build and pin an extractor, and run one request of zeros through it."""
        record.pinned = True
        runtime = await self.runtimes.load(record)
        if self.settings.lowering:
            await self.settle(runtime)  # ready means at full speed
        shapes = zip(record.description.inputs, record.description.usual_shapes(), strict=True)
        await self.features(record, {spec.name: torch.zeros(1, *shape) for spec, shape in shapes})
