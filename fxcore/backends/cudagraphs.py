"""CUDA graphs: a forward pass captured once per batch size and replayed as one launch.

Graphs are captured for some sizes up to ``LARGEST`` rows (:func:`captured_size`), each at its first use; other batches
are padded to the next of them. Larger batches, and other image sizes than the example's, run eagerly.

A capture fails if another thread synchronises the device or captures at the same time, and that thread's call fails
too: one thread must call all graphs of a process.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxcore.backends.backend import Inputs, Options, lowering
from fxcore.backends.eager import EagerModule

LARGEST = 64

Captured = tuple[torch.cuda.CUDAGraph, list[Tensor], dict[str, Tensor]]
"""A graph, the tensors that it reads, and those that it writes."""


class CudaGraphs:
    """Eager's kernels without their launch overhead; on CUDA only."""

    name = "cudagraphs"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if device.type != "cuda" or not torch.cuda.is_available():
            return "CUDA graphs need a CUDA device"
        return "CUDA graphs have no int8 arithmetic" if precision == "int8" else None

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> GraphedModule:
        with lowering(self.name):
            return GraphedModule(EagerModule(module), example)


class GraphedModule:
    """A :class:`~fxcore.backends.backend.Lowered` that replays captured passes."""

    def __init__(self, eager: EagerModule, example: Inputs) -> None:
        self._eager = eager
        self._row = [(tuple(x.shape[1:]), x.dtype) for x in example]
        self._graphs: dict[int, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes = 0

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        rows = inputs[0].shape[0]
        if rows > LARGEST or [(tuple(x.shape[1:]), x.dtype) for x in inputs] != self._row:
            return self._eager(*inputs)
        size = captured_size(rows)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, inputs[0].device)
        graph, static, outputs = self._graphs[size]
        for place, value in zip(static, inputs, strict=True):
            place[:rows].copy_(value, non_blocking=True)
        graph.replay()
        # The next replay overwrites the graph's outputs. Padding rows are dropped; an output may have k rows an image.
        return {key: value[: value.shape[0] // size * rows].clone() for key, value in outputs.items()}

    def storages(self) -> dict[int, int]:
        return self._eager.storages()

    @property
    def grown(self) -> int:
        # A list: another thread may capture meanwhile.
        inputs = sum(place.nbytes for _, static, _ in list(self._graphs.values()) for place in static)
        return inputs + self._pool_bytes

    def _capture(self, size: int, device: torch.device) -> Captured:
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
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        self._pool_bytes = sum(s["total_size"] for s in segments if s["segment_pool_id"] == self._pool)
        return graph, static, outputs


def captured_size(rows: int) -> int:
    """Return the smallest power of two, or three times one, that holds ``rows`` rows; at most a third of it is
    padding."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power
