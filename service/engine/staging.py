"""Memory that batches are put together in."""

from __future__ import annotations

from collections.abc import Sequence

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
        rows = sum(len(part) for part in parts)
        size = rows * like[0].numel() * like.element_size()
        while len(self._memory) <= place:
            self._memory.append(torch.empty(0, dtype=torch.uint8))
        if self._memory[place].nbytes < size:
            self._memory[place] = torch.empty(size, dtype=torch.uint8, pin_memory=self._locked)
        flat = self._memory[place][:size].view(like.dtype)
        if like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last):
            _, channels, height, width = like.shape
            batch = flat.view(rows, height, width, channels).permute(0, 3, 1, 2)
        else:
            batch = flat.view(rows, *like.shape[1:])
        start = 0
        for part in parts:
            batch[start : start + len(part)] = part
            start += len(part)
        return batch
