"""Reused memory in which batches are assembled, and copies out of it.

Most calls into torch release the GIL, and on a busy server getting it back takes a while. This module therefore makes
few of them: views are cached, and NumPy allocates.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from fxcore.images.decoding import Decoder
from fxcore.tensors import offsets, raw_bytes
from service.engine.threads import alone

LARGEST = 64 * 1024**2
"""Maximum reused bytes per model input; larger batches are allocated."""

_OUTPUTS = -1
"""The slot of outputs in the memory; inputs have slots from 0."""

_ALIGNED = 64

_COPIED_WITH_GIL = 1024**2
"""Maximum bytes copied while holding the GIL, which is faster than getting it back."""

_CACHED_VIEWS = 64


class Staging:
    """Assembles batches in reused memory. One thread uses it, one batch at a time.

    Allocating for every batch costs more than copying, because the system clears each new page. For CUDA the memory is
    pinned, which makes copies to the device fast.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}
        self._views: dict[Hashable, tuple[Tensor, memoryview]] = {}

    def inputs(self, parts: Sequence[tuple[Tensor, ...]], decoder: Decoder, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return a model's inputs on the device, valid until the next call.

        Args:
            parts: consecutive rows of the batch, each part with one tensor ``[n, ...]`` per input. All have the same
                dtype and, apart from the first dimension, the same shape. uint8 pixels are converted by ``decoder``.
                Tensors are on the CPU.
            decoder: the model's decoder.
            dtype: dtype of floating inputs.
        """
        inputs = []
        for place, tensors in enumerate(zip(*parts, strict=True)):
            rows = tensors[0] if len(tensors) == 1 else self._joined(place, tensors)
            inputs.append(self._ready(place, rows, decoder, dtype))
        return tuple(inputs)

    def on_host(self, values: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """Return ``values`` on the CPU, and whether the next call overwrites them.

        Values from another device are contiguous. Copies into pinned memory are four times as fast as into pageable
        memory (H100, 12 MB).
        """
        if self._device.type == "cpu":
            reused = {memory.untyped_storage().data_ptr() for memory in self._memory.values()}
            # An output may be an input, which the next batch overwrites.
            return [copied(one) if one.untyped_storage().data_ptr() in reused else one for one in values], False
        starts = offsets((value.nbytes for value in values), _ALIGNED)
        if starts[-1] > LARGEST:
            return [value.contiguous().cpu() for value in values], False
        memory, _ = self._taken(_OUTPUTS, torch.uint8, torch.Size((starts[-1],)))
        copies = []
        for start, value in zip(starts, values, strict=False):
            copy = memory[start : start + value.nbytes].view(value.dtype).view(value.shape)
            # Make it contiguous on the device, which is many times faster than on the CPU.
            copies.append(copy.copy_(value.contiguous(), non_blocking=True))
        torch.cuda.current_stream(self._device).synchronize()
        return copies, True

    def _ready(self, place: int, rows: Tensor, decoder: Decoder, dtype: torch.dtype) -> Tensor:
        if rows.dtype == torch.uint8:
            out = None
            if self._device.type == "cpu" and 4 * rows.nbytes <= LARGEST:
                out, _ = self._taken(place, torch.float32, rows.shape)
            moved = rows if self._device.type == "cpu" else rows.to(self._device, non_blocking=True)
            rows = alone(decoder.batch, moved, out)
        wanted = dtype if rows.dtype.is_floating_point else rows.dtype
        if rows.device == self._device and rows.dtype == wanted:
            return rows
        # Two calls: a single one would first convert into pageable memory, with another memory format.
        return rows.to(self._device, non_blocking=True).to(wanted)

    def _joined(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        """Return ``parts`` joined into one tensor."""
        like = parts[0]
        if sum(part.nbytes for part in parts) > LARGEST:
            return torch.cat(list(parts))
        rows = sum(part.shape[0] for part in parts)
        channels_last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
        batch, memory = self._taken(place, like.dtype, torch.Size((rows, *like.shape[1:])), channels_last)
        start = 0
        for part in parts:
            _copy(memory[start : start + part.nbytes], raw_bytes(part.permute(0, 2, 3, 1) if channels_last else part))
            start += part.nbytes
        return batch

    def _taken(
        self, place: int, dtype: torch.dtype, shape: torch.Size, channels_last: bool = False
    ) -> tuple[Tensor, memoryview]:
        """Return a tensor in reused memory, and its bytes in memory order."""
        known = self._views.get((place, dtype, shape, channels_last))
        if known is not None:
            return known
        count = shape.numel()
        memory = self._memory.get((place, dtype))
        if memory is None or memory.numel() < count:
            memory = torch.empty(count, dtype=dtype, pin_memory=self._device.type == "cuda")
            self._memory[place, dtype] = memory
            self._views.clear()  # some refer to the smaller memory just replaced
        if len(self._views) >= _CACHED_VIEWS:
            self._views.clear()
        flat = memory[:count]
        rows, *others = shape
        tensor = flat.view(rows, *others[1:], others[0]).permute(0, 3, 1, 2) if channels_last else flat.view(shape)
        view = self._views[place, dtype, shape, channels_last] = tensor, raw_bytes(flat)
        return view


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a CPU tensor, made on the calling thread only.

    torch splits copies of more than 32,768 values among its threads and waits for the last one, which may not get a
    core while images are decoded.
    """
    if not tensor.numel() or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        copy = torch.from_numpy(np.empty_like(tensor.numpy()))
    copy_rows(copy, 0, tensor)
    return copy


def copy_rows(whole: Tensor, start: int, values: Tensor) -> None:
    """Copy ``values`` to the rows of the contiguous ``whole`` from ``start`` on, on the calling thread only."""
    if values.numel():
        place = start * (values.nbytes // values.shape[0])
        _copy(raw_bytes(whole)[place : place + values.nbytes], raw_bytes(values))


def _copy(to: memoryview, of: memoryview) -> None:
    if len(of) <= _COPIED_WITH_GIL:
        to[:] = of
    else:
        np.frombuffer(to, np.uint8)[:] = np.frombuffer(of, np.uint8)
