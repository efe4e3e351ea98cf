"""A module that a test writes where it uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Of(nn.Module):
    """``forward`` is ``function(self, x)``, with the parts by their names."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)
