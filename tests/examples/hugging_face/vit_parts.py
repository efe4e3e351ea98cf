"""transformers' ViT for torch.fx, which cannot trace the forward of ``ViTModel`` itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import ViTModel


class ViTParts(nn.Module):
    """The parts of a ``ViTModel`` under their own names, from images ``[N, 3, H, W]`` to tokens ``[N, 1 + L, C]``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings, self.layers, self.layernorm = model.embeddings, model.layers, model.layernorm

    def forward(self, pixel_values: Tensor) -> Tensor:
        tokens = self.embeddings(pixel_values)
        for layer in self.layers:
            tokens = layer(tokens)
        normed: Tensor = self.layernorm(tokens)
        return normed


def from_pretrained(name: str) -> ViTParts:
    """Load the model from the hub's repository, or the folder, ``name``."""
    return ViTParts(ViTModel.from_pretrained(name, add_pooling_layer=False))
