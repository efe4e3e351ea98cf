"""Attributions on the device worker: a few backward passes through part of a model, between other requests' batches."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fxcore.attribution import gradcam, gradients, integration_points, positions
from fxcore.errors import BadTensor
from fxcore.extractor import OutputInfo
from fxcore.graph.axes.layout import TOKENS
from fxcore.graph.flops import FlopCounter
from service.choices import Attribution
from service.engine.description import Description
from service.engine.device.queue import Queue
from service.engine.options import FeatureResult
from service.engine.requests.admission.admission import Ticket
from service.engine.runtime.runtime import Runtime
from service.problems import ResponseTooLarge

_FORWARD_AND_BACKWARD = 3
"""FLOPs of a pass, as a multiple of those of its forward pass."""


@dataclass(frozen=True)
class Question:
    """The parameters of an attribution.

    Attributes:
        method: the attribution method.
        at: key of the values that a result is attributed to.
        target: index of the result; None for the largest of each image.
        steps: number of steps of integrated gradients.
    """

    method: Attribution
    at: OutputInfo
    target: int | None = None
    steps: int = 20

    def answered_bytes(self, shape: Sequence[int], limit: int) -> int:
        """Return the bytes of a float32 attribution to values of ``shape``.

        Raises:
            ResponseTooLarge: they exceed ``limit``.
        """
        cam = self.method == "gradcam"
        positions = {"NCHW": shape[2:], "NHWC": shape[1:3], TOKENS: shape[1:2]}.get(self.at.layout or "", shape[1:])
        size = torch.float32.itemsize * math.prod((shape[0], *positions) if cam else shape)
        if size > limit:
            ways = ["fewer images per request"] if shape[0] > 1 else []
            ways += [] if cam else ["method=gradcam"]
            raise ResponseTooLarge(size, limit, [*ways, "another node for at"])
        return size

    def of_rows(self, front: Description, values: FeatureResult, fixed: bool) -> Question:
        """Return this question with the grid of the tokens in ``values``, which differs for another image size.

        Args:
            front: computed the values from images.
            values: the values at ``at``, among others.
            fixed: whether sizes of the usual image are constants in the part of the model after ``at``.

        Raises:
            BadTensor: that part supports only the usual size, or the tokens have no known grid.
        """
        usual = tuple(front.usual_shapes())
        if values.shapes == {usual}:
            return self
        height, width = usual[0][-2:]
        if fixed or front.entry.one_size:
            raise BadTensor(
                f"the part of {front.spec.model} after {self.at.node} supports only the size that it is built for, "
                f"{height} x {width}; set image_size to the size of the images"
            )
        tokens = self.at.tokens
        if tokens is None or self.method != "gradcam":
            return self
        length = values.outputs[self.at.key].shape[1]
        grids = {tokens.at((shape[0][-2], shape[0][-1]), (height, width), length) for shape in values.shapes}
        sides = grids.pop() if len(grids) == 1 else None
        if sides is None:
            raise BadTensor(f"the {length} tokens of {self.at.node} have no known grid for images of this size")
        return replace(self, at=replace(self.at, tokens=replace(tokens, height=sides[0], width=sides[1])))


@dataclass(frozen=True)
class Attributed:
    """An attribution.

    Attributes:
        values: ``[n, H, W]`` for gradcam, otherwise the shape of the values at the node; on the CPU.
        targets: index of the attributed result of each image, int64 ``[n]``.
        milliseconds: time on the device.
    """

    values: Tensor
    targets: Tensor
    milliseconds: float


async def attribute(
    runtime: Runtime,
    values: Mapping[str, Tensor],
    asked: Question,
    queue: Queue,
    ticket: Ticket,
    max_bytes: int,
    max_response_bytes: int,
    deadline: float,
) -> Attributed:
    """Attribute a result of ``runtime``, which begins at inner nodes, to one of its inputs.

    Each pass takes one turn of its client and is one task of the device worker, so that other requests are computed in
    between, and a cancelled attribution stops after the current pass.

    Args:
        runtime: a runtime with one output, a vector per image.
        values: values of its inputs, ``[n, …]`` on the CPU.
        asked: the attribution to compute.
        queue: the device worker's queue.
        ticket: claims the memory of a pass.
        max_bytes: maximum bytes of a pass of several rows.
        max_response_bytes: maximum bytes of the attribution.
        deadline: when the caller will cancel it, on the clock of ``time.monotonic()``.

    Raises:
        BadTarget: the result has no value with that index.
        BadTensor: gradcam is requested for values without positions.
        AdmissionFull, RequestTooLarge, ResponseTooLarge: it does not fit.
        DeadlineExceeded: a pass of one row would take several times as long as until the deadline.
    """
    given = [values[spec.name] for spec in runtime.description.inputs]
    at = [spec.name for spec in runtime.description.inputs].index(asked.at.key)
    shapes = [tuple(value.shape[1:]) for value in given]
    row_bytes, row_flops = await asyncio.to_thread(_row_costs, runtime, shapes)
    runtime.pace.check(row_flops, deadline - time.monotonic(), shapes)
    most = min(len(given[0]), queue.max_rows, max_bytes // row_bytes)
    rows = max(1, most) if runtime.description.entry.batch else 1
    size = asked.answered_bytes(given[at].shape, max_response_bytes)
    ticket.claim(rows * row_bytes + sum(value.nbytes for value in given), size)
    parts, seconds = [], 0.0
    for start in range(0, len(given[0]), rows):
        part = _Part(runtime, [value[start : start + rows] for value in given], at, asked)
        works: list[Callable[[], None]] = [part.begin]
        works += [partial(part.differentiate, *point) for point in part.points]
        for work in (*works, part.end):
            await ticket.turn()
            try:
                seconds += await asyncio.wrap_future(queue.run_idle(partial(_timed, work), max_wait=0.0))
            except Exception as error:
                raise runtime.failure(error, shapes) from error
        parts.append((part.attributed, part.targets))  # not the part, which holds its values on the device
    attributed, targets = zip(*parts, strict=True)
    if len(parts) == 1:
        return Attributed(attributed[0], targets[0], seconds * 1000)
    return Attributed(await asyncio.to_thread(torch.cat, attributed), torch.cat(targets), seconds * 1000)


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class _Part:
    """The attribution of a part of the rows. Its methods run on the device worker.

    Args:
        runtime: see :func:`attribute`.
        values: the part's rows of its inputs.
        at: index of the input that the result is attributed to.
        asked: the attribution to compute.

    Attributes:
        points: share of the values and weight of each pass.
        targets: index of the result of each row; on the CPU after :meth:`end`.
        attributed: the attribution; set by :meth:`end`.
    """

    attributed: Tensor

    def __init__(self, runtime: Runtime, values: Sequence[Tensor], at: int, asked: Question) -> None:
        self._module = runtime.extractor.module
        self._placed = torch.device(runtime.description.device), runtime.description.dtype
        self._values, self._at, self._asked = list(values), at, asked
        self.targets: int | Tensor | None = asked.target
        self.points = integration_points(asked.steps) if asked.method == "integrated_gradients" else [(1.0, 1.0)]
        self._gradients: Tensor | None = None

    def begin(self) -> None:
        """Move the values to the device, and choose the targets if scaled values could lead to different ones."""
        self._values = [value.to(*self._placed) for value in self._values]
        if self.targets is None and self._asked.method == "integrated_gradients":
            with torch.no_grad():
                [result] = self._module(*self._values).values()
            self.targets = result.argmax(1)

    def differentiate(self, share: float, weight: float) -> None:
        """Add the gradients at ``share`` times the values, scaled by ``weight``."""
        values = list(self._values)
        if share != 1:
            values[self._at] = share * values[self._at]
        found = gradients(self._module, values, self._at, self.targets)
        self.targets = found.targets
        # Not in place: the gradients behind a sum are one value, expanded.
        added = found.values if weight == 1 else found.values * weight
        self._gradients = added if self._gradients is None else self._gradients.add_(added)

    def end(self) -> None:
        """Compute the attribution from the gradients."""
        found, values, info = self._gradients, self._values[self._at], self._asked.at
        assert found is not None
        assert isinstance(self.targets, Tensor)
        if self._asked.method == "integrated_gradients":
            found = found * values
        elif self._asked.method == "gradcam":
            found = gradcam(*(positions(one, info.layout, info.tokens) for one in (values, found)))
        self.attributed, self.targets = found.float().cpu(), self.targets.cpu()


def _row_costs(runtime: Runtime, shapes: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Return the bytes and FLOPs of one row of a pass: autograd keeps every value, and the gradients double that."""
    with FlopCounter() as counter:
        found = runtime.extractor.values_at(shapes)
    size = 2 * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found.values())
    return size, _FORWARD_AND_BACKWARD * counter.total
