"""Accuracy loss of each layer in int8, and the error for an int8 extractor that is too far from float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import fx

from fxcore.backends import Lowered
from fxcore.backends.eager import EagerInt8
from fxcore.extractor import Extractor
from fxcore.int8.report import LayerError, simulated
from service.engine.backends.checks import calibration_of
from service.engine.backends.fallback import OnlyBackend
from service.engine.description import Description
from service.engine.runtime.candidate import Candidate
from service.problems import BackendRefused

_SHOWN_LAYERS, _NAMED_LAYERS = 10, 3  # of the worst layers, in a list and in a sentence
_SIMULATED_IMAGES = 8  # that the value ranges come from


def int8_refusal(far: Candidate, layers: Sequence[LayerError]) -> BackendRefused:
    """Return the error for a spec whose candidate ``far`` is too far from float32.

    Args:
        layers: the loss of each layer, the largest first.
    """
    instead = "ask for precision=float32"
    if layers:
        instead += ", or keep such layers in float with the transform keep_float"
    named = ", ".join(f"{layer.name} ({layer.sqnr:z.0f} dB)" for layer in layers[:_NAMED_LAYERS])
    return BackendRefused(
        f"{far.backend} in int8 {far.reason}; most is lost in {named or 'no single layer'}",
        far.backend,
        instead,
        **far.figures(),
        layers=worst(layers),
    )


def worst(layers: Sequence[LayerError]) -> list[dict[str, Any]]:
    """Return the layers with the largest loss, for an extractor's checks or a problem response."""
    return [asdict(layer) for layer in layers[:_SHOWN_LAYERS]]


def simulation(description: Description, extractor: Extractor, folder: Path | None) -> list[LayerError]:
    """Estimate the loss of each layer of ``extractor`` in int8, with float operations between roundings.

    It takes seconds.

    Args:
        folder: folder of photographs to take the value ranges from instead of the shipped ones.
    """
    return simulated(extractor.module, calibration_of(description, extractor, folder)[:_SIMULATED_IMAGES])


def int8_graph(run: Lowered) -> fx.GraphModule | None:
    """Return the graph of torch's int8 kernels that ``run`` calls; None unless it is eager in int8."""
    run = run.lowered if isinstance(run, OnlyBackend) else run
    return run.module if isinstance(run, EagerInt8) else None
