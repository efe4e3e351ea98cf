"""Measures how far a backend's outputs are from eager's, and how fast it is, on photographs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxcore.analysis.verify import Verification, verify
from fxcore.backends import Lowered
from fxcore.errors import BadTensor
from fxcore.extractor import Extractor
from fxcore.photos import NoPhotographs, calibration_rows, check_rows, photos
from service.engine.description import Description
from service.engine.runtime.candidate import MIN_COSINE, TOLERANCE
from service.problems import ExtractorFailed

Inputs = tuple[Tensor, ...]
CALIBRATION_IMAGES = 32


class PassFailed(Exception):
    """A forward pass for a comparison or a trial raised."""


class Reference:
    """The reference: an extractor's own module, run on photographs. Its methods run on the device worker.

    Args:
        module: as it was built: nothing folded, nothing in place.
        rows: each photograph as inputs with one row, all of one shape.
        precision: the extractor's.
        one_size: whether the extractor takes no other size, see :func:`takes_one_size`.
    """

    def __init__(self, module: Callable[..., Any], rows: list[Inputs], precision: str, one_size: bool = False) -> None:
        self._module = module
        self._rows = rows
        self.precision = precision
        self._one_size = one_size

    @property
    def row_shapes(self) -> tuple[torch.Size, ...]:
        return tuple(x.shape[1:] for x in self._rows[0])

    def batches(self) -> list[range]:
        """Return the photographs of each batch to compare on: each alone, and a batch of two twice, since a backend may
        compute the first batch of a size in another way than later ones."""
        return [*(range(i, i + 1) for i in range(len(self._rows))), range(2), range(2)]

    def compare(self, lowered: Lowered, photographs: range) -> Verification:
        """Return how far ``lowered`` is from the module on a batch of these photographs."""
        return verify(self._module, lowered, self._batch(photographs))

    def takes_another_size(self, lowered: Lowered) -> bool:
        """Return whether ``lowered`` agrees with the module for inputs a quarter larger; False if either does not take
        them."""
        # Factors of channels have no size.
        if self._one_size or any(x.shape[-2:].numel() == 1 for x in self._rows[0]):
            return False
        try:
            larger = []
            for x, shape in zip(self._rows[0], _larger_shapes(self._rows[0]), strict=True):
                flat = torch.nn.functional.interpolate(x.flatten(1, -3).float(), size=shape[-2:])
                larger.append(flat.to(x.dtype).reshape(len(x), *shape))
            found = verify(self._module, lowered, tuple(larger))
        except Exception:
            return False
        if self.precision == "int8":
            return found.cosine >= MIN_COSINE
        return found.relative <= TOLERANCE[self.precision]

    def timed(self, run: Lowered, rows: int) -> float:
        """Return seconds of one forward pass of ``rows`` rows."""
        return timed(run, self._batch(range(rows)))

    def fastest(self, run: Lowered, rows: int, seconds: float) -> float:
        """Return seconds of the fastest forward pass of ``rows`` rows, among those that ``seconds`` suffice for."""
        batch = self._batch(range(rows))
        passes = [timed(run, batch)]
        while sum(passes) + min(passes) <= seconds:
            passes.append(timed(run, batch))
        return min(passes)

    def _batch(self, photographs: range) -> Inputs:
        """Return a batch with a row for each of ``photographs``, which are repeated as needed."""
        chosen = [self._rows[i % len(self._rows)] for i in photographs]
        return tuple(torch.cat(parts) for parts in zip(*chosen, strict=True))


def takes_one_size(description: Description, extractor: Extractor, inputs: Inputs) -> bool:
    """Return whether ``extractor`` is of a model built for one size, and cannot do with a quarter more than that of
    ``inputs``, as its first nodes may. To try it on another size would have torch.fx print a traceback."""
    if not description.entry.one_size:
        return False
    try:
        extractor.values_at(_larger_shapes(inputs))
    except BadTensor:
        return True
    return False


def _larger_shapes(inputs: Inputs) -> list[tuple[int, ...]]:
    """Return shapes of rows a quarter larger."""
    return [(*x.shape[1:-2], *(-(-d * 5 // 4 // 32) * 32 for d in x.shape[-2:])) for x in inputs]


def timed(run: Lowered, inputs: Inputs) -> float:
    """Return seconds of one forward pass."""
    device = inputs[0].device
    with torch.inference_mode():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run(*inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started


def example_rows(
    description: Description, extractor: Extractor, device: torch.device, folder: Path | None
) -> tuple[list[Inputs], list[Inputs]]:
    """Photographs as the extractor's inputs: those to compare on, and those that int8 is calibrated on.

    Args:
        folder: of photographs to calibrate on instead of those that are shipped.
    """
    calibration = calibration_of(description, extractor, folder) if description.spec.precision == "int8" else []
    return check_photographs(description, extractor, device), calibration


def check_photographs(
    description: Description, extractor: Extractor, device: torch.device, count: int | None = None
) -> list[Inputs]:
    """Return the shipped photographs, or the first ``count``, each as inputs of the extractor with one row."""
    size = description.preprocessing.nominal_size()
    rows = check_rows(description.preprocessing, extractor.graph.inputs, photos()[:count], size)
    return [extractor.entered(tuple(x.to(device, description.dtype) for x in row)) for row in rows]


def calibration_of(description: Description, extractor: Extractor, folder: Path | None) -> list[Inputs]:
    """Inputs to calibrate int8 of an extractor on, one row each: photographs in ``folder``, or the shipped ones.

    Raises:
        ExtractorFailed: there are none in ``folder``.
    """
    count = CALIBRATION_IMAGES if folder is None else 256
    size = description.preprocessing.nominal_size()
    try:
        rows = calibration_rows(description.preprocessing, extractor.graph.inputs, size, folder, count)
        return [extractor.entered(row) for row in rows]
    except NoPhotographs as error:
        said = f"int8 cannot be calibrated: {error.detail}"
        raise ExtractorFailed(said, problem={"error": error.detail}) from error
