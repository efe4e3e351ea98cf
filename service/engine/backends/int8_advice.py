"""What each layer loses in int8, and what to ask for instead if int8 is too far from float32."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import fx

from fxcore.backends.eager import EagerInt8
from fxcore.extractor import Extractor
from fxcore.int8.report import LayerError, Simulation, simulated
from fxcore.transforms.keep_float import keep_float
from service.engine.backends.checks import calibration_of
from service.engine.backends.fallback import OneSize
from service.engine.candidate import MIN_COSINE, Candidate
from service.engine.record import ExtractorRecord
from service.problems import BackendRefused
from service.schemas.v1 import ExtractorSpec

_SHOWN_LAYERS, _NAMED_LAYERS = 10, 3  # of those that lose most, in a list and in a sentence
_SIMULATED_IMAGES = 8  # that ranges are taken from
_MOST_PATHS = 64  # that a request's keep_float may have
_TRIES = 3
_MARGIN = 0.003
"""Margin by which a simulation must be nearer to float32 than required: torch's own ranges differ from it."""


class KeepFloatSearch:
    """The search for nodes that make a module agree in int8 when they are kept in float.

    Tried are the layers that lose most: first as many as a simulation needs, then twice as many.

    Args:
        module: too far from float32 in int8.
        simulation: of it.
        layers: what each layer loses, the most first.
    """

    def __init__(self, module: fx.GraphModule, simulation: Simulation, layers: Sequence[LayerError]) -> None:
        self._module = module
        self._simulation = simulation
        self._layers = layers
        self._found: tuple[list[str], Candidate] | None = None

    async def run(self, attempt: Callable[[fx.GraphModule], Awaitable[Candidate]]) -> None:
        """Run the search.

        Args:
            attempt: lowers a module to torch's own int8 and compares it with float32.
        """
        names = [layer.name for layer in self._layers]
        count = await asyncio.to_thread(self._fewest, names)
        for _ in range(_TRIES):
            paths = shortest_paths(names[:count], names)
            if count >= len(names) or len(paths) > _MOST_PATHS:
                return  # nothing would be int8, or more names than are taken
            found = await attempt(keep_float(self._module, nodes=paths))
            if found.agrees:
                self._found = paths, found
                return
            count *= 2

    def refusal(self, spec: ExtractorSpec, far: Candidate) -> BackendRefused:
        """The error for ``spec``, whose candidate ``far`` is too far from float32."""
        changed: dict[str, Any] = spec.model_dump(mode="json")
        steps = changed["transforms"]
        if self._found is not None:
            nodes, measured = self._found
            changed["transforms"] = [*steps, {"name": "keep_float", "params": {"nodes": nodes}}]
            changed["backend"] = "eager" if spec.backend == "eager" else "auto"  # openvino keeps nothing in float
            instead = f"it passes with the transform keep_float of {', '.join(nodes)}, at {measured.min_cosine:.4f}"
        else:
            changed["transforms"] = [s for s in steps if (s if isinstance(s, str) else s["name"]) != "keep_float"]
            changed["precision"] = "float32"
            instead = "ask for precision=float32"
        most = ", ".join(f"{layer.name} ({layer.sqnr:z.0f} dB)" for layer in self._layers[:_NAMED_LAYERS])
        return BackendRefused(
            f"{far.backend} in int8 {far.reason}; most is lost in {most or 'no single layer'}",
            far.backend,
            instead,
            **far.figures(),
            **shown(self._layers),
            spec=changed,
        )

    def _fewest(self, names: Sequence[str]) -> int:
        """How many of the layers ``names``, from the first on, have to stay in float by the simulation."""
        counts = range(1, len(names))
        return bisect_left(counts, MIN_COSINE + _MARGIN, key=lambda n: self._simulation.cosine(names[:n])) + 1


def shortest_paths(kept: Collection[str], every: Sequence[str]) -> list[str]:
    """The fewest paths that cover all of ``kept`` and nothing else in ``every``.

    >>> shortest_paths(["a.b.conv1", "a.b.conv2", "c"], ["a.b.conv1", "a.b.conv2", "a.d", "c", "c1"])
    ['a.b', 'c']
    """
    others = [name for name in every if name not in kept]
    paths: dict[str, None] = {}
    for name in kept:
        parts = name.split(".")
        prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
        free = (p for p in prefixes if not any(f"{other}.".startswith(p + ".") for other in others))
        paths[next(free, name)] = None  # a name also means everything under it
    return [path for path in paths if not any(path.startswith(other + ".") for other in paths)]


def shown(layers: Sequence[LayerError]) -> dict[str, Any]:
    """The layers that lose most, for an extractor's checks or a problem."""
    return {"layers": [asdict(layer) for layer in layers[:_SHOWN_LAYERS]]}


def simulation(record: ExtractorRecord, extractor: Extractor, folder: Path | None) -> Simulation:
    """``extractor`` in int8 as float operations between roundings; takes seconds.

    Args:
        folder: of photographs to take the ranges from instead of those that are shipped.
    """
    return simulated(extractor.module, calibration_of(record, folder)[:_SIMULATED_IMAGES])


def int8_graph(record: ExtractorRecord) -> fx.GraphModule | None:
    """The graph of torch's int8 kernels that serves ``record``, where eager does so in int8."""
    run = record.run.lowered if isinstance(record.run, OneSize) else record.run
    return run.module if isinstance(run, EagerInt8) else None
