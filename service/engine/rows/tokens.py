"""Some of the tokens of a value, or of the queries of attention weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.graph.layout import TOKENS

_OF_TOKENS = (TOKENS, "NWLC")


def check_tokens(shape: Sequence[int], layout: str | None, tokens: Sequence[int]) -> None:
    """Check that :func:`chosen` takes tensors of ``shape``.

    Raises:
        BadTensor: it has no tokens, or none of that index.
    """
    asked = f"tokens={','.join(map(str, tokens[:8]))}{',…' if len(tokens) > 8 else ''}"
    if layout not in _OF_TOKENS and not (layout is None and len(shape) > 3):
        raise BadTensor(
            f"{asked} chooses tokens [N, L, C] or queries of attention weights [N, heads, L, L] and this node gives "
            f"{layout or 'something else'} of shape {[None, *shape[1:]]}; leave tokens out"
        )
    count = shape[-2]
    if (most := max(tokens)) >= count:
        raise BadTensor(f"{asked}: this node has {count} tokens, so {most} is not one of 0 to {count - 1}")


def chosen_shape(shape: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return the shape of the result of :func:`chosen` for a tensor of ``shape``."""
    return [*shape[:-2], len(tokens), shape[-1]]


def chosen(tensor: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return some tokens, in the order given.

    Args:
        tensor: tokens ``[N, L, C]`` or ``[N, windows, L, C]``, or attention weights ``[N, heads, L, L]`` or
            ``[N, windows, heads, L, L]``, of which the queries are chosen.
        tokens: their indices, in each window.

    >>> chosen(torch.arange(6.0).reshape(1, 3, 2), [2, 0])
    tensor([[[4., 5.],
             [0., 1.]]])
    """
    return tensor.index_select(-2, torch.tensor(tokens, device=tensor.device))
