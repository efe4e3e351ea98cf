"""Attributions on the device worker: a few passes back through a part of a model, between other requests' batches."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fxcore.attribution import gradcam, gradients, integration_points, positions
from fxcore.extractor import OutputInfo
from fxcore.graph.layout import TOKENS
from service.choices import Attribution
from service.engine.device.queue import Queue
from service.engine.requests.admission.admission import Ticket
from service.engine.runtime.runtime import Runtime
from service.problems import DeadlineExceeded, ResponseTooLarge


@dataclass(frozen=True)
class Question:
    """What is asked of an attribution.

    Attributes:
        method: which attribution.
        at: key of the values that a result is attributed to.
        target: index of the result; None for the largest of each image.
        steps: of integrated gradients.
    """

    method: Attribution
    at: OutputInfo
    target: int | None = None
    steps: int = 20

    def answered_bytes(self, shape: Sequence[int], limit: int) -> int:
        """Return bytes of the attribution to values of ``shape``, float32.

        Raises:
            ResponseTooLarge: more than ``limit``.
        """
        cam = self.method == "gradcam"
        positions = {"NCHW": shape[2:], "NHWC": shape[1:3], TOKENS: shape[1:2]}.get(self.at.layout or "", shape[1:])
        size = torch.float32.itemsize * math.prod((shape[0], *positions) if cam else shape)
        if size > limit:
            ways = ["fewer images a request"] if shape[0] > 1 else []
            ways += [] if cam else ["method=gradcam"]
            raise ResponseTooLarge(size, limit, [*ways, "another node for at"])
        return size


@dataclass(frozen=True)
class Attributed:
    """An attribution.

    Attributes:
        values: ``[n, H, W]`` of gradcam, else of the shape of the values at the node; on the CPU.
        targets: index of the result of each image, int64 ``[n]``.
        milliseconds: on the device.
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
    deadline: float,
    max_response_bytes: int,
) -> Attributed:
    """Attribute a result of ``runtime``, which begins at inner nodes, to one of its inputs.

    Each pass has a turn of its client and is a task of the device worker, so that other requests are computed in
    between, and one that is given up ends after its pass.

    Args:
        runtime: with one output, a vector an image.
        values: of its inputs, ``[n, …]`` on the CPU.
        asked: the attribution.
        queue: the device worker's.
        ticket: claims the memory of a pass.
        deadline: on the clock of ``time.monotonic()``.
        max_response_bytes: of the attribution.

    Raises:
        BadTarget: the result has no such value.
        BadTensor: gradcam of values without positions.
        AdmissionFull, RequestTooLarge, ResponseTooLarge: it does not fit.
        DeadlineExceeded: it is too late.
    """
    given = [values[spec.name] for spec in runtime.description.inputs]
    at = [spec.name for spec in runtime.description.inputs].index(asked.at.key)
    row_bytes = await asyncio.to_thread(_row_bytes, runtime, given)
    rows = max(1, min(len(given[0]), queue.max_rows, queue.max_bytes // row_bytes))
    size = asked.answered_bytes(given[at].shape, max_response_bytes)
    ticket.claim(rows * row_bytes + sum(value.nbytes for value in given), size)
    parts, seconds = [], 0.0
    for start in range(0, len(given[0]), rows):
        part = _Part(runtime, [value[start : start + rows] for value in given], at, asked)
        works: list[Callable[[], None]] = [part.begin]
        works += [partial(part.differentiate, *point) for point in part.points]
        for work in (*works, part.end):
            await ticket.turn()
            if time.monotonic() > deadline:
                raise DeadlineExceeded()
            seconds += await asyncio.wrap_future(queue.run_idle(partial(_timed, work), max_wait=0.0))
        parts.append(part)
    attributed, targets = ([getattr(part, name) for part in parts] for name in ("attributed", "targets"))
    if len(parts) == 1:
        return Attributed(attributed[0], targets[0], seconds * 1000)
    return Attributed(await asyncio.to_thread(torch.cat, attributed), torch.cat(targets), seconds * 1000)


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class _Part:
    """The attribution of some rows. Its methods run on the device worker.

    Args:
        runtime: see :func:`attribute`.
        values: of its inputs, some rows of them.
        at: which input the result is attributed to.
        asked: the attribution.

    Attributes:
        points: the passes, by share of the values and weight.
        targets: index of the result of each row, on the CPU in the end.
        attributed: in the end.
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
        """Put the values on the device, and choose the targets where passes with other values would choose others."""
        self._values = [value.to(*self._placed) for value in self._values]
        if self.targets is None and len(self.points) > 1:
            with torch.no_grad():
                [result] = self._module(*self._values).values()
            self.targets = result.argmax(1)

    def differentiate(self, share: float, weight: float) -> None:
        """Add the gradients at a ``share`` of the values, times ``weight``."""
        values = list(self._values)
        if share != 1:
            values[self._at] = share * values[self._at]
        found = gradients(self._module, values, self._at, self.targets)
        self.targets = found.targets
        added = found.values if weight == 1 else found.values.mul_(weight)
        self._gradients = added if self._gradients is None else self._gradients.add_(added)

    def end(self) -> None:
        """Make the attribution of the gradients."""
        found, values, info = self._gradients, self._values[self._at], self._asked.at
        assert found is not None
        assert isinstance(self.targets, Tensor)
        if self._asked.method == "integrated_gradients":
            found = found * values
        elif self._asked.method == "gradcam":
            found = gradcam(*(positions(one, info.layout, info.tokens) for one in (values, found)))
        self.attributed, self.targets = found.float().cpu(), self.targets.cpu()


def _row_bytes(runtime: Runtime, values: Sequence[Tensor]) -> int:
    """Return bytes of a row of a pass: autograd keeps every value, and the gradients take as much again."""
    shapes = tuple(tuple(value.shape[1:]) for value in values)
    found = runtime.extractor.values_at(shapes)
    return 2 * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found.values())
