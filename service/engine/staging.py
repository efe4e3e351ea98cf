"""Memory that batches are put together in, and copies out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.engine.inputs import joined

LARGEST = 64 * 1024**2
"""Bytes that stay taken for each input of a model; larger batches get memory of their own."""


class Staging:
    """Puts batches together in memory that is taken once. One thread uses it, one batch at a time.

    Fresh memory for every batch costs more than the copying: the system hands it out page by page, and clears each. For
    CUDA it is page-locked, which the copy to the device needs to be fast.
    """

    def __init__(self, device: torch.device) -> None:
        self._locked = device.type == "cuda"
        self._memory: list[Tensor] = []

    def joined(self, parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """One tensor for each input of a model out of several, good until the next call.

        A single part is handed on as it is.
        """
        inputs = list(zip(*parts, strict=True))
        if len(parts) == 1 or any(sum(t.nbytes for t in tensors) > LARGEST for tensors in inputs):
            return joined(parts)
        return tuple(self._put(place, tensors) for place, tensors in enumerate(inputs))

    def _put(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        like = parts[0]
        channels_last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
        order = (0, 2, 3, 1) if channels_last else tuple(range(like.ndim))
        size = sum(part.nbytes for part in parts)
        while len(self._memory) <= place:
            self._memory.append(torch.empty(0, dtype=torch.uint8))
        if self._memory[place].nbytes < size:
            self._memory[place] = torch.empty(size, dtype=torch.uint8, pin_memory=self._locked)
        flat = self._memory[place][:size]
        memory = flat.numpy()
        start = 0
        for part in parts:
            memory[start : start + part.nbytes] = _bytes(part.permute(order))
            start += part.nbytes
        inner = like.permute(order).shape[1:]
        batch = flat.view(like.dtype).view(-1, *inner)
        return batch.permute(0, 3, 1, 2) if channels_last else batch


def copied(tensor: Tensor) -> Tensor:
    """A copy of a CPU tensor in memory of its own, made by this thread alone.

    torch shares a copy of over 32,768 values among its threads, and then waits for one that may have no core while
    images are decoded.
    """
    if not tensor.numel():
        return tensor.clone()
    return torch.from_numpy(_bytes(tensor).copy()).view(tensor.dtype).view(tensor.shape)


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
