"""Attributions on the device worker: a few passes back through a part of a model, between other requests' batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fxcore.attribution import Gradients, check_result, gradcam, gradients, integration_points, positions
from fxcore.extractor import OutputInfo
from service.engine.device.queue import Queue
from service.engine.requests.admission import Ticket
from service.engine.runtime import Runtime
from service.problems import DeadlineExceeded

Method = Literal["gradcam", "gradient", "integrated_gradients"]


@dataclass(frozen=True)
class Question:
    """What is asked of an attribution.

    Attributes:
        method: which attribution.
        at: key of the values that a result is attributed to.
        target: index of the result; None for the largest of each image.
        steps: of integrated gradients.
    """

    method: Method
    at: OutputInfo
    target: int | None = None
    steps: int = 20


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
    runtime: Runtime, values: Mapping[str, Tensor], asked: Question, queue: Queue, ticket: Ticket, deadline: float
) -> Attributed:
    """Attribute a result of ``runtime``, which begins at inner nodes, to one of its inputs.

    Each pass is a task of the device worker, so that other requests are computed in between, and one that is given up
    ends after its pass.

    Args:
        runtime: with one output, a vector an image.
        values: of its inputs, ``[n, …]`` on the CPU.
        asked: the attribution.
        queue: the device worker's.
        ticket: claims the memory of a pass.
        deadline: on the clock of ``time.monotonic()``.

    Raises:
        BadTarget: the result has no such value.
        BadTensor: gradcam of values without positions.
        AdmissionFull, RequestTooLarge: its memory does not fit.
        DeadlineExceeded: it is too late.
    """
    check_result(runtime.outputs[0].shape[1:], asked.target)
    given = [values[spec.name] for spec in runtime.description.inputs]
    at = [spec.name for spec in runtime.description.inputs].index(asked.at.key)
    row_bytes = _row_bytes(runtime, given)
    rows = max(1, min(len(given[0]), queue.max_rows, queue.max_bytes // row_bytes))
    size = given[at].nbytes
    ticket.claim(rows * row_bytes + sum(value.nbytes for value in given), size)
    await ticket.turn()
    made, targets, seconds = [], [], 0.0
    for start in range(0, len(given[0]), rows):
        part = [value[start : start + rows] for value in given]
        found, spent = await _of_rows(runtime, part, at, asked, queue, deadline)
        seconds += spent
        made.append(found.values)
        targets.append(found.targets)
    return Attributed(torch.cat(made), torch.cat(targets), seconds * 1000)


async def _of_rows(
    runtime: Runtime, values: Sequence[Tensor], at: int, asked: Question, queue: Queue, deadline: float
) -> tuple[Gradients, float]:
    """Return the attribution of some rows, and the seconds it took on the device."""
    device, dtype = torch.device(runtime.description.device), runtime.description.dtype
    seconds = 0.0
    total: Tensor | None = None
    target: int | Tensor | None = asked.target
    if target is None and asked.method == "integrated_gradients":
        target = (await _pass(runtime, values, at, None, queue, deadline))[0].targets
    points = integration_points(asked.steps) if asked.method == "integrated_gradients" else [(1.0, 1.0)]
    for share, weight in points:
        scaled = [share * value if place == at else value for place, value in enumerate(values)]
        found, spent = await _pass(runtime, scaled, at, target, queue, deadline)
        seconds += spent
        total = weight * found.values if total is None else total + weight * found.values
    assert total is not None
    place = values[at].to(device, dtype)
    if asked.method == "integrated_gradients":
        total = total * place
    if asked.method == "gradcam":
        layout, tokens = asked.at.layout, asked.at.tokens
        total = gradcam(positions(place, layout, tokens), positions(total, layout, tokens))
    return Gradients(found.targets.cpu(), total.float().cpu()), seconds


async def _pass(
    runtime: Runtime,
    values: Sequence[Tensor],
    at: int,
    target: int | Tensor | None,
    queue: Queue,
    deadline: float,
) -> tuple[Gradients, float]:
    """Differentiate once on the device worker; the seconds it took."""
    if time.monotonic() > deadline:
        raise DeadlineExceeded()
    device, dtype = torch.device(runtime.description.device), runtime.description.dtype

    def work() -> tuple[Gradients, float]:
        started = time.perf_counter()
        found = gradients(runtime.extractor.module, [value.to(device, dtype) for value in values], at, target)
        return found, time.perf_counter() - started

    return await asyncio.wrap_future(queue.run_idle(work, max_wait=0.0))


def _row_bytes(runtime: Runtime, values: Sequence[Tensor]) -> int:
    """Return bytes of a row of a pass: autograd keeps every value, and the gradients take as much again."""
    shapes = tuple(tuple(value.shape[1:]) for value in values)
    found = runtime.extractor.values_at(shapes)
    return 2 * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found.values())
