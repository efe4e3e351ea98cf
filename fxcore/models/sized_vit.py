"""torchvision's vision transformers for inputs of any height and width."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer


class SizedViT(VisionTransformer):  # type: ignore[misc]
    """A vision transformer for a fixed height and width; torchvision's own supports only square inputs."""

    input_size: tuple[int, int]

    def _process_input(self, x: Tensor) -> Tensor:
        # Mirrors torchvision line by line, so that nodes have the same names.
        n, _, h, w = x.shape
        p = self.patch_size
        height, width = self.input_size
        torch._assert(h == height, f"Wrong image height! Expected {height} but got {h}!")
        torch._assert(w == width, f"Wrong image width! Expected {width} but got {w}!")
        n_h = h // p
        n_w = w // p
        x = self.conv_proj(x)
        x = x.reshape(n, self.hidden_dim, n_h * n_w)
        return x.permute(0, 2, 1)


def sized(model: VisionTransformer, height: int, width: int) -> SizedViT:
    """Change ``model`` to accept inputs of that size, leaving its position embeddings uninitialised.

    Raises:
        ValueError: a side is not a multiple of the patch size.

    >>> from torchvision.models import vit_b_32
    >>> sized(vit_b_32(image_size=32), 64, 96).encoder.pos_embedding.shape
    torch.Size([1, 7, 768])
    """
    patch = model.patch_size
    if height % patch or width % patch:
        raise ValueError(f"height and width are multiples of the patch, {patch}")
    changed: Any = model
    changed.__class__ = SizedViT
    changed.input_size = height, width
    tokens = 1 + (height // patch) * (width // patch)
    changed.seq_length = tokens
    changed.encoder.pos_embedding = nn.Parameter(torch.empty(1, tokens, model.hidden_dim))
    result: SizedViT = changed
    return result


def resampled(embeddings: Tensor, height: int, width: int) -> Tensor:
    """Resample the position embeddings of a square to ``height`` x ``width`` patches.

    This does what :func:`torchvision.models.vision_transformer.interpolate_embeddings` does for squares.

    Args:
        embeddings: floating-point ``[1, 1 + side * side, C]``, the class token first.

    Returns:
        ``[1, 1 + height * width, C]`` in the same dtype.
    """
    side = math.isqrt(embeddings.shape[1] - 1)
    if (side, side) == (height, width):
        return embeddings
    grid = embeddings[:, 1:].float().permute(0, 2, 1).reshape(1, -1, side, side)
    grid = nn.functional.interpolate(grid, (height, width), mode="bicubic", align_corners=True)
    return torch.cat([embeddings[:, :1], grid.flatten(2).permute(0, 2, 1).to(embeddings.dtype)], dim=1)
