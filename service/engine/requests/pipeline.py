"""The path of a request through the engine: plan, admission, decoding, device queue, result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from fxcore.edits import Edit
from service.engine.backends.fallback import OnlyBackend
from service.engine.backends.upgrades import Upgrades
from service.engine.device.job import Job
from service.engine.device.queue import Queue
from service.engine.lifecycle.variants import Variants
from service.engine.memory.projections import Projections
from service.engine.options import VALID_BOX, FeatureOptions, FeatureResult
from service.engine.requests.admission.admission import Admission, Ticket
from service.engine.requests.decoding import Decoding
from service.engine.requests.plan.edits import at_fault, planned_factors, resolved
from service.engine.requests.plan.images import plan_images
from service.engine.requests.plan.limits import check_rows, check_sizes
from service.engine.requests.plan.plan import Inputs
from service.engine.requests.plan.regions import PlannedRegions
from service.engine.requests.plan.sizes import sizes
from service.engine.requests.plan.tensors import plan_tensors
from service.engine.runtime.runtime import Runtime
from service.engine.threads import Threads, in_pool
from service.schemas.regions import GivenRegions
from service.settings import Settings


class Pipeline:
    """Computes features for admitted requests. For one event loop.

    Args:
        settings: the service's settings.
        admission: the limits that requests claim bytes from.
        queue: decoded rows waiting for the device worker.
        threads: its ``intake`` reads headers and predicts sizes, its ``decoders`` decode.
        upgrades: counts the images of each extractor.
        projections: the projection matrices.
        variants: runtimes for edits, and for other sizes of fixed-size models.
    """

    def __init__(
        self,
        settings: Settings,
        admission: Admission,
        queue: Queue,
        threads: Threads,
        upgrades: Upgrades,
        projections: Projections,
        variants: Variants,
    ) -> None:
        self._settings = settings
        self._admission = admission
        self._queue = queue
        self._intake = threads.intake
        self._decoders = threads.decoders
        self._upgrades = upgrades
        self._projections = projections
        self._variants = variants

    async def compute(
        self,
        runtime: Runtime,
        images: Inputs,
        given: GivenRegions | None,
        options: FeatureOptions,
        ticket: Ticket,
        edits: Sequence[Edit],
        deadline: float,
    ) -> FeatureResult:
        """Compute features of ``images`` with ``runtime``; see :meth:`service.engine.engine.Engine.features`."""
        started = time.monotonic()
        description, max_pixels = runtime.description, self._settings.max_pixels
        preprocess = self._settings.preprocess if options.preprocess == "default" else options.preprocess
        if isinstance(images, Mapping):
            plan = plan_tensors(description, images, preprocess, max_pixels)
        else:
            plan = await plan_images(description, images, preprocess, max_pixels, self._intake)
        check_sizes(description, plan, max_pixels)
        with ExitStack() as stack:
            if edits:
                edits = resolved(edits, runtime.extractor.graph.resolve)
                stack.enter_context(at_fault(edits))
            edited = {edit.node for edit in edits}
            variant, runtimes = await self._variants.hold(stack, runtime, edited, plan.shapes)
            for shape, one in runtimes.items():
                if isinstance(run := one.run, OnlyBackend):
                    run.check(shape)
            outputs = variant.extractor.outputs
            placing = None if given is None else PlannedRegions(plan, given, outputs, options.roi_size)
            counts = plan.shapes if placing is None else placing.counts
            limit = self._admission.max_bytes
            if options.sent:
                limit = min(limit, self._settings.max_response_bytes)
            sized = await sizes(description, runtimes, plan, counts, options, limit, self._intake)
            check_rows(description, plan, sized.rows, self._settings.max_batch_bytes)
            for shape, row in sized.rows.items():
                variant.pace.check(row.flops, deadline - time.monotonic(), shape)
            matrices = {}
            if options.project is not None:
                matrices = await self._projections.get(sized.lengths, options.project, options.seed)
            at_once, held = plan.at_once(self._settings.decode_threads, self._admission.max_bytes)
            factors, regions = None, None
            if edits:
                factors = await planned_factors(variant.description, edits, plan, sized.rows, self._intake)
                held += factors.bytes
            if placing is not None:
                held += await in_pool(self._intake, placing.weight_bytes, sized.rows)
            ticket.claim(held, sized.response)
            if placing is not None:
                regions = await placing.place(sized.rows, self._intake)
            waited = await ticket.turn()
            made = await asyncio.to_thread(factors.make) if factors else None
            job = Job(variant, options, plan.shapes.total(), regions, matrices, made)
            Decoding(plan, job, self._queue, runtimes, sized.rows, at_once, self._decoders).start()
            try:
                computed = await job.result()
            except BaseException:  # the rest of its rows would wait for a batch, and hold memory until then
                self._queue.discard(job)
                raise
            for shape, one in runtimes.items():
                self._upgrades.used(one, plan.shapes[shape], variant=one is not runtime)
        timings = {
            "decode": 1000 * (job.queued - started - waited),
            "queue": 1000 * (waited + max(0.0, time.monotonic() - job.queued - job.computed)),
            "compute": 1000 * job.computed,
        }
        answered = {key: computed[key] for key in description.return_nodes if key in computed}
        if plan.valid_boxes is not None:
            of_rows = slice(None) if regions is None else regions.image
            answered[VALID_BOX] = plan.valid_boxes[of_rows].contiguous()
        return FeatureResult(
            answered, timings, job.rows, frozenset(plan.shapes), None if regions is None else regions.image
        )
