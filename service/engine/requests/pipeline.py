"""A request's way through the engine: planned, admitted, decoded, queued for the device, answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import torch
from torch import Tensor

from fxcore.edits import Edit
from fxcore.images.files import Header
from service.engine.backends.upgrades import Upgrades
from service.engine.device.job import Job
from service.engine.device.queue import Queue
from service.engine.memory.projections import Projections
from service.engine.memory.variants import Variants
from service.engine.options import VALID_BOX, FeatureOptions, FeatureResult
from service.engine.requests import planning
from service.engine.requests.admission.admission import Admission, Ticket
from service.engine.requests.decoding import Decoders, Decoding
from service.engine.requests.plan import edits as editing
from service.engine.requests.plan import images as image_plan
from service.engine.requests.plan.edits import PlannedEdits
from service.engine.requests.plan.plan import Inputs, Plan
from service.engine.requests.plan.sizes import projected_lengths, response_bytes, row_size
from service.engine.rows.regions import Regions
from service.engine.rows.shapes import RowShape
from service.engine.runtime.runtime import Runtime
from service.engine.threads import in_pool
from service.schemas.regions import GivenRegions
from service.settings import Settings


class Sizes(NamedTuple):
    """What a request will hold and answer, known before anything is computed.

    Attributes:
        row_bytes: what a row of each shape takes on the device.
        response_bytes: of the response.
    """

    row_bytes: dict[RowShape, int]
    response_bytes: int


class Pipeline:
    """Computes features for admitted requests. For one event loop.

    Args:
        settings: the service's settings.
        admission: what requests claim their bytes of.
        queue: where decoded rows wait for the device worker.
        intake: the thread that reads headers and predicts sizes.
        decoders: the threads that decode.
        upgrades: counts what each extractor answers.
        projections: the matrices of those requests that project.
        variants: what computes other sizes of models that are built for one, and edits.
    """

    def __init__(
        self,
        settings: Settings,
        admission: Admission,
        queue: Queue,
        intake: Executor,
        decoders: Decoders,
        upgrades: Upgrades,
        projections: Projections,
        variants: Variants,
    ) -> None:
        self._settings = settings
        self._admission = admission
        self._queue = queue
        self._intake = intake
        self._decoders = decoders
        self._upgrades = upgrades
        self._projections = projections
        self._variants = variants

    async def compute(
        self,
        runtime: Runtime,
        images: Inputs,
        given: GivenRegions | None,
        options: FeatureOptions,
        deadline: float,
        ticket: Ticket,
        edits: Sequence[Edit] = (),
    ) -> FeatureResult:
        """Features of ``images`` by ``runtime``, which is built; see :meth:`service.engine.engine.Engine.features`."""
        started = time.monotonic()
        plan = await self._plan(runtime, images, options)
        exact = editing.resolved(runtime, edits)
        with editing.at_fault(exact):
            async with self._variants.use(runtime, plan.shapes, [edit.node for edit in exact]) as variant:
                return await self._compute(variant, plan, given, options, deadline, ticket, started, exact)

    async def _compute(
        self,
        runtime: Runtime,
        plan: Plan,
        given: GivenRegions | None,
        options: FeatureOptions,
        deadline: float,
        ticket: Ticket,
        started: float,
        edits: Sequence[Edit],
    ) -> FeatureResult:
        regions = await self._regions(runtime, plan, options, given)
        sizes = await self._sizes(runtime, plan, options, regions)
        matrices = {}
        if options.project is not None:
            lengths = projected_lengths(runtime, plan.shapes, options)
            matrices = await self._projections.get(lengths, options.project, options.seed)
        at_once = plan.at_once(self._settings.decode_threads, self._admission.max_bytes)
        planned = await in_pool(self._intake, PlannedEdits, runtime, edits, plan.shapes) if edits else None
        ticket.claim(plan.held(at_once) + (planned.bytes if planned else 0), sizes.response_bytes)
        waited = await ticket.turn()
        factors = await asyncio.to_thread(planned.make) if planned else None
        job = Job(runtime, options, len(plan.shapes), deadline, regions, matrices, factors)
        Decoding(plan, job, self._queue, sizes.row_bytes, at_once).start(self._decoders)
        boxes_of_rows = plan.valid_boxes
        shapes = plan.shapes
        del plan  # now the decoders and the queue own the images
        outputs = await job.result()
        timings = {
            "decode": job.queued - started - waited,
            "queue": waited + max(0.0, time.monotonic() - job.queued - job.computed),
            "compute": job.computed,
        }
        self._upgrades.used(runtime, shapes)
        answered = {key: outputs[key] for key in runtime.description.return_nodes if key in outputs}
        if boxes_of_rows:
            boxes_of_images = torch.tensor(boxes_of_rows, dtype=torch.float32)
            of_rows = slice(None) if regions is None else regions.image
            answered[VALID_BOX] = boxes_of_images[of_rows]
        return FeatureResult(
            answered,
            {stage: seconds * 1000 for stage, seconds in timings.items()},
            job.rows,
            None if regions is None else regions.image,
        )

    async def _plan(self, runtime: Runtime, images: Inputs, options: FeatureOptions) -> Plan:
        preprocess, max_pixels = options.preprocess, self._settings.max_pixels
        if preprocess == "default":
            preprocess = self._settings.preprocess
        if isinstance(images, Mapping) or image_plan.is_quick(images):
            return planning.plan(runtime, images, preprocess, max_pixels)
        image_plan.check_takes_images(runtime.description, images)
        headers: list[Header] = []
        for indices in image_plan.header_steps(len(images)):  # other requests get their turn in between
            headers += await in_pool(self._intake, image_plan.read_headers, images, indices, max_pixels)
        return await in_pool(self._intake, planning.plan, runtime, images, preprocess, max_pixels, headers)

    async def _regions(
        self, runtime: Runtime, plan: Plan, options: FeatureOptions, given: GivenRegions | None
    ) -> Regions | None:
        if given is None:
            return None
        for shape in set(plan.shapes):
            await in_pool(self._intake, row_size, runtime, shape)
        placements = planning.check_regions(plan, given)
        placed: list[Mapping[str, Tensor]] = []
        for indices in planning.region_steps(given):  # other requests get their turn in between
            placed += await in_pool(self._intake, planning.carry, runtime, plan, given, placements, indices)
        return await in_pool(self._intake, planning.regions, runtime, plan, given, placed, options.roi_size)

    async def _sizes(self, runtime: Runtime, plan: Plan, options: FeatureOptions, regions: Regions | None) -> Sizes:
        predicted = (runtime, plan, options, regions, self._settings.max_response_bytes)
        if all(shape in runtime.at(shape).row_sizes for shape in set(plan.shapes)):
            return _predicted(*predicted)
        return await in_pool(self._intake, _predicted, *predicted)


def _predicted(
    runtime: Runtime, plan: Plan, options: FeatureOptions, regions: Regions | None, max_response_bytes: int
) -> Sizes:
    counts = None if regions is None else regions.counts
    response = response_bytes(runtime, plan.shapes, options, max_response_bytes, counts)
    row_bytes = {shape: row_size(runtime, shape).bytes for shape in set(plan.shapes)}
    return Sizes(row_bytes, response)
