"""Plans a request before it is decoded, and places its boxes on the feature maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fxcore.errors import BadBox
from fxcore.images.files import Header
from fxcore.pooling import pooled_regions_shape
from service.engine.backends.fallback import OneSize
from service.engine.regions import Boxes, Regions
from service.engine.requests.image_plan import check_takes_images, plan_images, read_headers
from service.engine.requests.plan import Inputs, Plan, indexed
from service.engine.requests.sizes import row_size
from service.engine.requests.tensor_plan import plan_tensors
from service.engine.runtime import Runtime

_MAX_SAMPLES = 2**31
"""Maximum values of maps that the boxes of a request may sample: others wait while they are pooled."""


def plan(runtime: Runtime, inputs: Inputs, preprocess: str, max_pixels: int, headers: Sequence[Header] = ()) -> Plan:
    """Plan a request without decoding it, in any thread.

    Args:
        runtime: the extractor.
        inputs: of the request.
        preprocess: ``default``, ``pil``, ``fast`` or ``none``; see :class:`~service.engine.options.FeatureOptions`.
        max_pixels: maximum pixels of an image.
        headers: of the images, where :func:`~service.engine.requests.image_plan.check_takes_images` and
            :func:`~service.engine.requests.image_plan.read_headers` were called already.

    Raises:
        BadImage, ImageTooLarge: by the header of an image; ``index`` in ``extra`` says which.
        BadTensor: a wrong name, shape or dtype, or a size that the extractor's backend does not take.
    """
    if isinstance(inputs, Mapping):
        made = plan_tensors(runtime.description, inputs, preprocess, max_pixels)
    else:
        if not headers:
            check_takes_images(runtime.description, inputs)
            headers = read_headers(inputs, range(len(inputs)), max_pixels)
        made = plan_images(runtime.description, inputs, preprocess, max_pixels, headers)
    if isinstance(runtime.run, OneSize):
        for shape in dict.fromkeys(made.shapes):
            runtime.run.check(shape)
    return made


def regions(runtime: Runtime, planned: Plan, boxes: Boxes, size: int) -> Regions:
    """Carry ``boxes``, in pixels of the images as sent, over to the model's input and its maps. The sizes of the plan's
    rows must be known.

    Args:
        size: positions a side of what each box becomes.

    Raises:
        BadBox: one is wrong; ``index`` and ``box`` in ``extra`` say which. Or pooling all of them takes too long.
    """
    placements = planned.placements()
    if len(boxes) != len(placements):
        raise BadBox(
            f"boxes needs a list for each image, {len(placements)} in all, and has {len(boxes)}: give an empty list "
            "for an image without boxes"
        )
    carried: list[Tensor] = []
    for index, (placement, given) in enumerate(zip(placements, boxes, strict=True)):
        with indexed(index):
            carried.append(placement.carry(given))
    rows = [row_size(runtime, shape) for shape in planned.shapes]
    samples = 0
    for row, of_image in zip(rows, carried, strict=True):
        for info in runtime.outputs:
            if (grid := row.grids.get(info.key)) is not None:
                channels = pooled_regions_shape(row.outputs[info.key][0], info.layout, 1)[1]
                samples += channels * grid.samples(of_image, size)
    if samples > _MAX_SAMPLES:
        raise BadBox(
            f"pooling these boxes takes {samples:,} values of the maps, and at most {_MAX_SAMPLES:,} are taken in one "
            "request: send fewer or smaller boxes, or ask for a coarser level"
        )
    return Regions(carried, [row.grids for row in rows])
