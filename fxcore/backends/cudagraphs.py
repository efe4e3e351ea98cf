"""CUDA graphs: a forward pass captured once per batch size and replayed as one launch.

Graphs are captured for some sizes up to ``LARGEST`` rows (:func:`captured_size`), each at its first use; other batches
are padded to the next of them. Larger batches, and other image sizes than the example's, run eagerly.

All graphs of a device compute in the same memory, as only one is replayed at a time and its outputs are copied. So one
thread must call all graphs of a process, which captures need too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxcore.backends.backend import Inputs, LoweringFailed, Options, lowering
from fxcore.backends.eager import EagerModule
from fxcore.backends.folds import WeakCache
from fxcore.errors import summarize
from fxcore.tensors import offsets
from fxcore.tracing.fake_tensors import fake_failure

LARGEST = 64

_ALIGNED = 256
"""Bytes; kernels that read vectors need 16, and the allocator gives multiples of 512."""


class CudaGraphs:
    """Eager's kernels without their launch overhead; on CUDA only."""

    name = "cudagraphs"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if device.type != "cuda" or not torch.cuda.is_available():
            return "CUDA graphs need a CUDA device"
        return "CUDA graphs have no int8 arithmetic" if precision == "int8" else None

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> GraphedModule:
        with lowering(self.name):
            eager = EagerModule(module)
            failure = fake_failure(eager, example)
            # A capture that fails leaves torch's allocator and random generator of the device unusable.
            if failure is not None:
                why = f"it reads values on the host, or has operations that torch does not know: {summarize(failure)}"
                raise LoweringFailed(f"a CUDA graph cannot be captured of this model: {why}", backend=self.name)
            return GraphedModule(eager, example)


class Captured(NamedTuple):
    """A graph, the tensors that it reads, those that it writes, and the memory that it computes in."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: dict[str, Tensor]
    scratch: Scratch


class GraphedModule:
    """A :class:`~fxcore.backends.backend.Lowered` that replays captured passes."""

    grown = 0

    def __init__(self, eager: EagerModule, example: Inputs) -> None:
        self._eager = eager
        self._row = [(tuple(x.shape[1:]), x.dtype) for x in example]
        self._captured: dict[int, Captured] = {}

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        rows = inputs[0].shape[0]
        if rows > LARGEST or [(tuple(x.shape[1:]), x.dtype) for x in inputs] != self._row:
            return self._eager(*inputs)
        size = captured_size(rows)
        if size not in self._captured:
            self._captured[size] = self._capture(size, inputs[0].device)
        graph, static, outputs, _ = self._captured[size]
        with torch.inference_mode():
            for place, value in zip(static, inputs, strict=True):
                place[:rows].copy_(value, non_blocking=True)
                place[rows:].zero_()  # else what another extractor's inputs are as this dtype
            graph.replay()
            # Padding rows are dropped; an output may have k rows an image.
            return {key: value[: value.shape[0] // size * rows].clone() for key, value in outputs.items()}

    def storages(self) -> dict[int, int]:
        return self._eager.storages()

    def _capture(self, size: int, device: torch.device) -> Captured:
        scratch = _scratches.get_or_make(device, lambda: Scratch(device))
        assert scratch is not None
        inputs = scratch.inputs.tensors([((size, *shape), dtype) for shape, dtype in self._row], device)
        for x in inputs:
            x.zero_()
        scratch.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(scratch.stream):
            for _ in range(3):  # libraries choose kernels and allocate workspaces in the first passes
                values = self._eager(*inputs)
        torch.cuda.current_stream(device).wait_stream(scratch.stream)
        places = scratch.outputs.tensors([(tuple(value.shape), value.dtype) for value in values.values()], device)
        outputs = dict(zip(values, places, strict=True))
        del values
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(device)
        try:
            # Other threads may use the device meanwhile (uploads); only this thread's calls must be capturable.
            with torch.cuda.graph(graph, scratch.pool, scratch.stream, capture_error_mode="thread_local"):
                for key, value in self._eager(*inputs).items():
                    outputs[key].copy_(value)
        except BaseException:
            torch.cuda.set_stream(current)  # which torch leaves at the capture's
            raise
        return Captured(graph, inputs, outputs, scratch)


class Memory:
    """Memory that the graphs of a device share, of the size that the largest so far needs."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensors(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> list[Tensor]:
        """Return tensors of these shapes and dtypes, which overlap with all that were returned before.

        Graphs that were captured before it grew go on in the smaller memory.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        starts = offsets(sizes, _ALIGNED)
        if self._bytes.nbytes < starts[-1]:
            self._bytes = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        return [
            self._bytes[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, wanted, strict=False)
        ]


class Scratch:
    """What all graphs of a device compute in, for as long as there is one."""

    def __init__(self, device: torch.device) -> None:
        self.inputs = Memory()
        self.outputs = Memory()
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Never replayed: a pool cannot be used again once no graph is left in it.
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._first, self.pool, self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=device)


_scratches: WeakCache[Scratch] = WeakCache()


def captured_size(rows: int) -> int:
    """Return the smallest power of two, or three times one, that holds ``rows`` rows; at most a third of it is
    padding."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power
