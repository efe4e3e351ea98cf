"""Backends that run extractors, one per file. Each implements :class:`~fxcore.backends.backend.Backend`.

>>> import torch
>>> from fxcore import build_extractor, get_model, load_model, model_graph, verify
>>> graph = model_graph("resnet18")
>>> extractor = build_extractor(graph, load_model(get_model("resnet18"), "random"), graph.resolve(["C2"]))
>>> x = torch.rand(2, 3, 64, 64)
>>> lowered = BACKENDS["eager"].lower(extractor.module, (x,), Options())  # batch norms folded, channels_last
>>> verify(extractor.module, lowered, x).allclose
True
>>> BACKENDS["cudagraphs"].unavailable(torch.device("cpu"), "float32")
'CUDA graphs need a CUDA device'
"""

from __future__ import annotations

import torch

from fxcore.backends.backend import Backend, Lowered, LoweringFailed, Options
from fxcore.backends.cudagraphs import CudaGraphs
from fxcore.backends.eager import Eager
from fxcore.backends.inductor import Inductor
from fxcore.backends.openvino import OpenVINO
from fxcore.backends.processor import computes_bfloat16

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Eager(), OpenVINO(), CudaGraphs(), Inductor())}
"""All backends by name."""

__all__ = [
    "BACKENDS",
    "Backend",
    "Lowered",
    "LoweringFailed",
    "Options",
    "faster_than_eager",
    "first_choice",
    "why_bfloat16_is_slow",
]


def first_choice(device: torch.device, precision: str) -> Backend:
    """Return the backend to start with: OpenVINO for int8 if it is installed, otherwise eager."""
    openvino = BACKENDS["openvino"]
    return openvino if precision == "int8" and openvino.unavailable(device, precision) is None else BACKENDS["eager"]


def faster_than_eager(device: torch.device, precision: str) -> list[Backend]:
    """Return the available backends that are likely faster than eager, the most promising first.

    On a CPU only OpenVINO qualifies: inductor was not faster wherever both were measured, and compiles for minutes.
    """
    likely = [BACKENDS["openvino"]] if device.type == "cpu" else [BACKENDS["cudagraphs"]]
    return [backend for backend in likely if backend.unavailable(device, precision) is None]


def why_bfloat16_is_slow(device: torch.device) -> str | None:
    """Return a clause saying why bfloat16 is slower than float32 on ``device``; None if it is not, or on a GPU."""
    if device.type == "cpu" and not computes_bfloat16():
        return "this processor does not compute in bfloat16, which takes longer here than float32"
    return None
