"""Memory that batches are put together in, and copies out of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fxcore.decoding import Decoder
from service.codecs.datatypes import raw_bytes
from service.engine.threads import alone

LARGEST = 64 * 1024**2
"""Bytes that stay taken for each input of a model; larger batches get memory of their own."""

_HELD = 1024**2
"""Up to so many bytes, copying takes less than getting the interpreter's lock back after giving it away."""


class Staging:
    """Puts batches together in memory that is taken once. One thread uses it, one batch at a time.

    Fresh memory for every batch costs more than the copying: the system hands it out page by page, and clears each. For
    CUDA it is page-locked, which the copy to the device needs to be fast.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}

    def inputs(self, parts: Sequence[tuple[Tensor, ...]], decoder: Decoder, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A model's inputs on the device, good until the next call.

        Args:
            parts: of each of its rows, or of several, one tensor ``[n, ...]`` for each input. All have one shape, but
                for the first dimension, and one dtype; uint8 is what ``decoder`` makes a batch of.
            decoder: the model's.
            dtype: of floating inputs.
        """
        return tuple(
            self._ready(place, self._joined(place, tensors), decoder, dtype)
            for place, tensors in enumerate(zip(*parts, strict=True))
        )

    def _ready(self, place: int, rows: Tensor, decoder: Decoder, dtype: torch.dtype) -> Tensor:
        if rows.dtype == torch.uint8:
            out = None
            if self._device.type == "cpu" and 4 * rows.nbytes <= LARGEST:
                out = self._taken(place, torch.float32, rows.numel()).view(rows.shape).permute(0, 3, 1, 2)
            moved = rows.to(self._device, non_blocking=True)
            rows = alone(lambda: decoder.batch(moved, out))
        return rows.to(self._device, dtype if rows.is_floating_point() else None, non_blocking=True)

    def _joined(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        """One tensor of several; a single one is handed on as it is."""
        if len(parts) == 1:
            return parts[0]
        like = parts[0]
        if sum(part.nbytes for part in parts) > LARGEST:
            return torch.cat(list(parts))
        channels_last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
        order = (0, 2, 3, 1) if channels_last else tuple(range(like.ndim))
        rows = sum(part.shape[0] for part in parts)
        batch = self._taken(place, like.dtype, sum(part.numel() for part in parts))
        memory = raw_bytes(batch)
        start = 0
        for part in parts:
            _copy(memory[start : start + part.nbytes], raw_bytes(part.permute(order) if channels_last else part))
            start += part.nbytes
        batch = batch.view(rows, *(like.shape[axis] for axis in order[1:]))
        return batch.permute(0, 3, 1, 2) if channels_last else batch

    def _taken(self, place: int, dtype: torch.dtype, count: int) -> Tensor:
        """``[count]`` values of memory that stays taken."""
        known = self._memory.get((place, dtype))
        if known is None or known.numel() <= count:
            # One more than any batch fills: an answer that is a model's input is then not all of its memory, so that
            # its job copies it, and the next batch leaves it alone.
            known = torch.empty(count + 1, dtype=dtype, pin_memory=self._device.type == "cuda")
            self._memory[place, dtype] = known
        return known[:count]


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy of a CPU tensor in memory of its own, made by this thread alone.

    torch shares a copy of over 32,768 values among its threads, and then waits for one that may have no core while
    images are decoded.
    """
    if not tensor.numel() or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_rows(copy, 0, tensor)
    return copy


def copy_rows(whole: Tensor, start: int, values: Tensor) -> None:
    """Copy ``values`` to the rows of ``whole``, which is contiguous, from ``start`` on; by this thread alone."""
    if values.numel():
        place = start * (values.nbytes // values.shape[0])
        _copy(raw_bytes(whole)[place : place + values.nbytes], raw_bytes(values))


def _copy(to: memoryview, of: memoryview) -> None:
    if len(of) <= _HELD:
        to[:] = of
    else:
        np.frombuffer(to, np.uint8)[:] = np.frombuffer(of, np.uint8)
