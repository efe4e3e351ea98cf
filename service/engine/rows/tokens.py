"""Selection of tokens, or of the queries of attention weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.graph.axes.layout import TOKENS

_OF_TOKENS = (TOKENS, "NWLC")


def has_tokens(layout: str | None, queries: bool) -> bool:
    """Return whether :func:`chosen` accepts tensors of a layout.

    Args:
        layout: layout of one row; see :func:`service.engine.rows.shapes.row_layout`.
        queries: see :class:`fxcore.extractor.OutputInfo`.
    """
    return queries or layout in _OF_TOKENS


def chosen_shape(shape: Sequence[int], layout: str | None, queries: bool, tokens: Sequence[int]) -> list[int]:
    """Return the shape of the result of :func:`chosen` for a tensor of ``shape``; see :func:`has_tokens`.

    Raises:
        BadTensor: it has no tokens, or no token with that index.
    """
    asked = f"tokens={','.join(map(str, tokens[:8]))}{',…' if len(tokens) > 8 else ''}"
    if not has_tokens(layout, queries):
        raise BadTensor(
            f"{asked} selects tokens [N, L, C] or queries of attention weights [N, heads, L, L], but this node gives "
            f"{layout or 'values of unknown axes'} of shape {[None, *shape[1:]]}; leave tokens out"
        )
    count = shape[-2]
    if (most := max(tokens)) >= count:
        raise BadTensor(f"{asked}: this node has {count} tokens, from 0 to {count - 1}, and no token {most}")
    return [*shape[:-2], len(tokens), shape[-1]]


def chosen(tensor: Tensor, tokens: Sequence[int]) -> Tensor:
    """Select tokens, in the order given.

    Args:
        tensor: tokens ``[N, L, C]`` or ``[N, windows, L, C]``, or attention weights ``[N, heads, L, L]`` or ``[N,
            windows, heads, L, L]``, whose queries are selected.
        tokens: indices of the tokens, within each window.

    >>> chosen(torch.arange(6.0).reshape(1, 3, 2), [2, 0])
    tensor([[[4., 5.],
             [0., 1.]]])
    """
    return tensor.index_select(-2, torch.tensor(tokens, device=tensor.device))
