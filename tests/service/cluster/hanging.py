"""A user's model that hangs if a row requests it."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

HANG = 1001.0


@torch.fx.wrap
def hang(x: Tensor) -> Tensor:
    """Return ``x`` ``[N, 3, H, W]``, after an hour if the first value of a row is :data:`HANG`."""
    if not x.is_meta and HANG in x[:, 0, 0, 0].tolist():
        time.sleep(3600)
    return x


class Hanging(nn.Module):
    """A model with a single convolution, ``conv``, that returns ``[N, 8, H, W]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(hang(x))
