"""CUDA graphs: a forward pass recorded once per batch size and replayed as one launch.

A graph is recorded for the powers of two up to ``LARGEST`` rows; other batches are padded to the next. What is larger,
or has another image size than the example, runs eagerly.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxcore.backends.base import Inputs, Options, lowering
from fxcore.backends.eager import EagerModule

LARGEST = 64

Recorded = tuple[torch.cuda.CUDAGraph, list[Tensor], dict[str, Tensor]]
"""A graph, and the memory that it reads and writes."""


class CudaGraphs:
    """Eager's own kernels without their launch costs. Only on CUDA."""

    name = "cudagraphs"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if device.type != "cuda" or not torch.cuda.is_available():
            return "CUDA graphs need a CUDA device"
        return "CUDA graphs have no int8 arithmetic" if precision == "int8" else None

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> GraphedModule:
        with lowering(self.name):
            lowered = GraphedModule(EagerModule(module), example)
            lowered(*(x[:1] for x in example))
            return lowered


class GraphedModule:
    """A :class:`~fxcore.backends.base.Lowered` that replays recorded passes; each size is recorded at its first use."""

    def __init__(self, eager: EagerModule, example: Inputs) -> None:
        self._eager = eager
        self._row = [(tuple(x.shape[1:]), x.dtype) for x in example]
        self._graphs: dict[int, Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        rows = inputs[0].shape[0]
        if rows > LARGEST or [(tuple(x.shape[1:]), x.dtype) for x in inputs] != self._row:
            return self._eager(*inputs)
        size = 1 << (rows - 1).bit_length()
        if size not in self._graphs:
            self._graphs[size] = self._recorded(size, inputs[0].device)
        graph, static, outputs = self._graphs[size]
        for place, value in zip(static, inputs, strict=True):
            place[:rows].copy_(value, non_blocking=True)
        graph.replay()
        # The next replay overwrites the graph's own outputs. Rows that only pad are cut; an output has k rows an image.
        return {key: value[: value.shape[0] // size * rows].clone() for key, value in outputs.items()}

    def storages(self) -> dict[int, int]:
        return self._eager.storages()

    def _recorded(self, size: int, device: torch.device) -> Recorded:
        static = [torch.zeros(size, *shape, dtype=dtype, device=device) for shape, dtype in self._row]
        # Other threads may use the device meanwhile (uploads); only this thread's calls must be capturable.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose kernels and allocate workspaces in the first passes
                self._eager(*static)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = self._eager(*static)
        return graph, static, outputs
