"""torch inductor, ahead of time: one compiled package for all batch sizes, cached on disk.

On CPUs only, with frozen weights; it needs a C++ compiler. On CUDA, graphs take most of what it could gain, in a second
instead of minutes.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import Tensor, fx

from fxcore.backends import aoti
from fxcore.backends.artifacts import compiled
from fxcore.backends.backend import Inputs, Options, by_key, distinct_outputs


class Inductor:
    """Generated C++."""

    name = "inductor"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if device.type != "cpu":
            return f"inductor compiles for CPUs here, not for {device}"
        if precision == "int8":
            return "inductor serves float precisions, not int8"
        if not aoti.available():
            return aoti.MISSING
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return f"inductor needs a C++ compiler and there is no {compiler!r}; install g++ or set CXX"
        return None

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> InductorModule:
        unique, places = distinct_outputs(module)
        inputs = tuple(map(_laid_out, example))
        return compiled(
            self.name,
            unique,
            inputs,
            options,
            (),
            lambda folder: InductorModule(str(folder / "model.pt2"), places),
            strides=[x.stride() for x in inputs],
        )


class InductorModule:
    """A :class:`~fxcore.backends.backend.Lowered` over a compiled package."""

    recalled = False

    grown = 0

    def __init__(self, path: str, places: dict[str, int]) -> None:
        self._run = aoti.load_package(path)
        self._places = places
        self._bytes = os.path.getsize(path)

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            values = self._run(*map(_laid_out, inputs))
            return by_key(self._places, values, inputs)

    def storages(self) -> dict[int, int]:
        return {id(self): self._bytes}


def _laid_out(x: Tensor) -> Tensor:
    """``x`` in the memory format that the package is compiled for: channels last for images, as they are decoded.

    The compiled code has the strides of the example built in, and does not check those of its inputs.
    """
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.contiguous_format)
