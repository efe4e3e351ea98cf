"""Measurement of a backend's error against eager, and of its speed, on photographs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxcore.analysis.verify import Verification, verify
from fxcore.backends import Lowered
from fxcore.errors import BadTensor
from fxcore.extractor import Extractor
from fxcore.nesting import clones
from fxcore.photos import NoPhotographs, calibration_rows, input_rows, photos
from service.engine.description import Description
from service.engine.runtime.candidate import MIN_COSINE, TOLERANCE
from service.problems import ExtractorFailed

Inputs = tuple[Tensor, ...]
CALIBRATION_IMAGES = 32


class PassFailed(Exception):
    """A forward pass of a comparison or a trial raised an exception."""


class Expected(NamedTuple):
    """A batch, and what a module computes for it."""

    inputs: Inputs
    values: Any

    def compare(self, lowered: Lowered) -> Verification:
        """Compare the values of ``lowered`` with these. Runs on the device worker."""
        return verify(lambda *_: self.values, lowered, self.inputs)


class Reference:
    """The reference for comparisons: an extractor's own module, run on photographs. Methods run on the device worker.

    Args:
        module: the module as built: nothing folded, nothing in place.
        rows: the photographs as inputs of one row each, all of one shape.
        precision: the extractor's precision.
        larger: shapes of one row of inputs of another size; None to compare on no other. See :func:`larger_shapes`.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        rows: list[Inputs],
        precision: str,
        larger: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._module = module
        self._rows = rows
        self.precision = precision
        self._larger = larger

    @property
    def row_shapes(self) -> tuple[torch.Size, ...]:
        return tuple(x.shape[1:] for x in self._rows[0])

    def batches(self) -> list[range]:
        """Return the photographs of each batch to compare on.

        Each photograph is a batch of its own, and a batch of two is run twice: a backend may compute the first batch of
        a size differently from later ones.
        """
        return [*(range(i, i + 1) for i in range(len(self._rows))), range(2), range(2)]

    def expected(self, photographs: range) -> Expected:
        """Compute the module's values for a batch of these photographs."""
        return self._expected(self._batch(photographs))

    def expected_larger(self) -> Expected | None:
        """Compute the module's values for inputs of another size; None if it does not accept them."""
        if self._larger is None:
            return None
        try:
            larger = []
            for x, shape in zip(self._rows[0], self._larger, strict=True):
                flat = torch.nn.functional.interpolate(x.flatten(1, -3).float(), size=shape[-2:])
                larger.append(flat.to(x.dtype).reshape(len(x), *shape))
            return self._expected(tuple(larger))
        except Exception:
            return None

    def _expected(self, inputs: Inputs) -> Expected:
        with torch.no_grad():
            return Expected(inputs, self._module(*clones(inputs)))

    def agrees(self, lowered: Lowered, larger: Expected) -> bool:
        """Return whether ``lowered`` accepts inputs of another size and is close to their expected values."""
        try:
            found = larger.compare(lowered)
        except Exception:
            return False
        if self.precision == "int8":
            return found.cosine >= MIN_COSINE
        return found.relative <= TOLERANCE[self.precision]

    def timed(self, run: Lowered, rows: int) -> float:
        """Return the seconds of one forward pass of ``rows`` rows."""
        return timed(run, self._batch(range(rows)))

    def fastest(self, run: Lowered, rows: int, seconds: float) -> float:
        """Return the seconds of the fastest forward pass of ``rows`` rows, out of as many as fit into ``seconds``."""
        batch = self._batch(range(rows))
        passes = [timed(run, batch)]
        while sum(passes) + min(passes) <= seconds:
            passes.append(timed(run, batch))
        return min(passes)

    def _batch(self, photographs: range) -> Inputs:
        """Return a batch with one row per index in ``photographs``; the photographs repeat as needed."""
        chosen = [self._rows[i % len(self._rows)] for i in photographs]
        return tuple(torch.cat(parts) for parts in zip(*chosen, strict=True))


def larger_shapes(extractor: Extractor, inputs: Inputs) -> list[tuple[int, ...]] | None:
    """Return row shapes about a quarter larger than those of ``inputs``; None if ``extractor`` accepts none of them.

    Height and width are odd and differ if it accepts that. A compiled model may contain what a branch does for the
    usual size, such as not to pad to a multiple of 16, or for squares.

    Asking the extractor first avoids the traceback that torch.fx prints when a module fails.
    """
    if extractor.edited:  # the factors of edits have no spatial size
        return None
    for less in ((5, 7), (0, 0)):
        shapes = [
            (*x.shape[1:-2], *(-(-d * 5 // 4 // 32) * 32 - n for d, n in zip(x.shape[-2:], less, strict=True)))
            for x in inputs
        ]
        try:
            extractor.values_at(shapes)
            return shapes
        except BadTensor:
            continue
    return None


def timed(run: Lowered, inputs: Inputs) -> float:
    """Return the seconds of one forward pass."""
    device = inputs[0].device
    with torch.inference_mode():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run(*inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started


def check_photographs(description: Description, extractor: Extractor, count: int | None = None) -> list[Inputs]:
    """Return the shipped photographs, or the first ``count``, each as inputs of the extractor with one row."""
    size = description.preprocessing.nominal_size()
    rows = input_rows(description.preprocessing, extractor.graph.inputs, photos()[:count], size)
    return [extractor.inputs_from(tuple(x.to(description.device, description.dtype) for x in row)) for row in rows]


def calibration_of(description: Description, extractor: Extractor, folder: Path | None) -> list[Inputs]:
    """Return the int8 calibration inputs of an extractor, one row each: photographs in ``folder``, or the shipped ones.

    Raises:
        ExtractorFailed: ``folder`` has no photographs.
    """
    count = CALIBRATION_IMAGES if folder is None else 256
    size = description.preprocessing.nominal_size()
    try:
        rows = calibration_rows(description.preprocessing, extractor.graph.inputs, size, folder, count)
        return [extractor.inputs_from(row) for row in rows]
    except NoPhotographs as error:
        said = f"int8 cannot be calibrated: {error.detail}"
        raise ExtractorFailed(said, problem={"error": error.detail}) from error
