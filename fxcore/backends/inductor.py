"""torch's own compiler, ahead of time: one library for every batch size, kept between starts.

On CPU with frozen weights (it needs a C++ compiler), on CUDA with max-autotune.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import Tensor, fx

from fxcore.backends.artifacts import compiled
from fxcore.backends.base import Inputs, Options, by_key, distinct_outputs


class Inductor:
    """Generated C++ on CPU, Triton on CUDA."""

    name = "inductor"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if precision == "int8":
            return "inductor serves float precisions, not int8"
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return f"inductor needs a C++ compiler and there is no {compiler!r}; install g++ or set CXX"
        return None

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> InductorModule:
        unique, places = distinct_outputs(module)
        return compiled(
            self.name,
            unique,
            example,
            options,
            (),
            lambda folder: InductorModule(str(folder / "model.pt2"), places),
            cuda=torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else None,
        )


class InductorModule:
    """A :class:`~fxcore.backends.base.Lowered` over a compiled package."""

    def __init__(self, path: str, places: dict[str, int]) -> None:
        self._run = torch._inductor.aoti_load_package(path)
        self._places = places
        self._bytes = os.path.getsize(path)

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            values = self._run(*inputs)
            return by_key(self._places, values, inputs)

    def storages(self) -> dict[int, int]:
        return {id(self): self._bytes}
