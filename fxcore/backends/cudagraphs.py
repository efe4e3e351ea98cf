"""CUDA graphs: capture a forward pass once per batch size and replay it as one launch.

Graphs are captured for certain batch sizes up to ``LARGEST`` rows (:func:`captured_size`), each at its first use; other
batches are padded to the next captured size. Larger batches, and image sizes other than the example's, run eagerly.

All graphs of a device share the same memory, since only one is replayed at a time and its outputs are copied.
Therefore one thread must call all graphs of a process; capture requires this too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxcore.backends.backend import LoweringFailed, Options, lowering
from fxcore.backends.eager import EagerModule
from fxcore.backends.folds import WeakCache
from fxcore.errors import summarize
from fxcore.nesting import tensors_in
from fxcore.tensors import Tensors, offsets
from fxcore.tracing.dispatch_modes import LenientMode
from fxcore.tracing.failures.fake_tensors import fake_failure

LARGEST = 64

_ALIGNED = 256
"""Alignment in bytes. Vectorized kernels need 16; the caching allocator aligns to 512."""


class CudaGraphs:
    """The eager kernels without launch overhead; CUDA only."""

    name = "cudagraphs"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if device.type != "cuda" or not torch.cuda.is_available():
            return "CUDA graphs need a CUDA device"
        return "CUDA graphs have no int8 arithmetic" if precision == "int8" else None

    def lower(self, module: fx.GraphModule, example: Tensors, options: Options) -> GraphedModule:
        with lowering(self.name):
            eager = EagerModule(module)
            failure = fake_failure(watched(eager), example)
            # A failed capture leaves the device's allocator and random generator in torch unusable.
            if failure is not None:
                why = f"it reads values on the host, or has operations that torch does not know: {summarize(failure)}"
                raise LoweringFailed(f"a CUDA graph cannot be captured of this model: {why}", backend=self.name)
            return GraphedModule(eager, example)


class OnDevice(LenientMode):
    """A dispatch mode in which operations raise if they copy values between the host and a device.

    Kernels take the value of a tensor without dimensions as an argument, so that it is not copied.

    Raises:
        RuntimeError: an operation copies values; the message names it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs, result))
        copies = "copy" in func.__name__
        if {x.device.type for x in tensors if x.ndim > 0 or copies} > {"cpu"}:
            raise RuntimeError(f"{func} copies values between the host and a device")
        return result


def watched(run: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """Return a function that calls ``run`` as a capture does, and raises where a capture would fail."""

    def call(*inputs: Tensor) -> dict[str, Tensor]:
        with inputs[0].device, OnDevice():
            return run(*inputs)

    return call


class Captured(NamedTuple):
    """A captured graph with its static inputs and outputs and the memory it runs in."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: dict[str, Tensor]
    scratch: Scratch


class GraphedModule:
    """A :class:`~fxcore.backends.backend.Lowered` that replays captured passes."""

    grown = 0

    def __init__(self, eager: EagerModule, example: Tensors) -> None:
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
                place[rows:].zero_()  # otherwise another extractor's inputs, reinterpreted as this dtype
            graph.replay()
            # Drop the padding rows; an output may have k rows per image.
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
        # Models that make tensors of constants on the host, as MViT does, make them on the device.
        with device, torch.cuda.stream(scratch.stream):
            for _ in range(3):  # warm up: libraries choose kernels and allocate workspaces in the first passes
                values = self._eager(*inputs)
        torch.cuda.current_stream(device).wait_stream(scratch.stream)
        places = scratch.outputs.tensors([(tuple(value.shape), value.dtype) for value in values.values()], device)
        outputs = dict(zip(values, places, strict=True))
        del values
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(device)
        try:
            # Other threads may use the device meanwhile (uploads); only this thread's calls must be capturable.
            captured = torch.cuda.graph(graph, scratch.pool, scratch.stream, capture_error_mode="thread_local")
            with device, captured:
                for key, value in self._eager(*inputs).items():
                    outputs[key].copy_(value)
        except BaseException:
            torch.cuda.set_stream(current)  # torch leaves the capture stream current
            raise
        return Captured(graph, inputs, outputs, scratch)


class Memory:
    """Memory shared by the graphs of a device, as large as the largest graph so far needs."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensors(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> list[Tensor]:
        """Return tensors of these shapes and dtypes; they overlap with all tensors returned before.

        When the memory grows, graphs captured before keep using the old, smaller memory.
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
    """The memory, pool and stream of all graphs of a device, kept for as long as one of the graphs exists."""

    def __init__(self, device: torch.device) -> None:
        self.inputs = Memory()
        self.outputs = Memory()
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Never replayed, but keeps the pool alive: a pool without graphs cannot be used again.
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._first, self.pool, self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=device)


_scratches: WeakCache[Scratch] = WeakCache()


def captured_size(rows: int) -> int:
    """Round ``rows`` up to a power of two, or to three times a power of two; at most a third is padding."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power
