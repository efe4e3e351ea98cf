"""Pool feature maps to one vector per image, point or mask, or to one small map per box.

All dimensions except the batch and the channels are pooled; the layout determines which these are. Vectors are returned
unchanged, and tokens that do not stand for a position are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import grid_sample
from torchvision.ops import roi_align

from fxcore.errors import BadTensor
from fxcore.graph.axes.layout import TOKENS
from fxcore.graph.head_pooling import DISTILLED
from fxcore.graph.tokens.prefix_tokens import NO_PREFIX, PrefixTokens
from fxcore.graph.tokens.token_grid import TokenGrid

Method = Literal["avg", "max", "gem", "cls"]
METHODS: tuple[Method, ...] = get_args(Method)

GEM_POWER = 3.0
"""Exponent of the generalised mean, as published for retrieval features (Radenović et al., 2018)."""

_GEM_FLOOR = 1e-6


def channel_dim(layout: str | None, ndim: int) -> int:
    """Return the dimension of the channels.

    If the layout is unknown, sequences ``[N, L, C]`` are assumed to have channels last, other tensors in dimension 1.
    """
    if layout == TOKENS:
        return ndim - 1
    if layout is not None and "C" in layout and len(layout) == ndim:
        return layout.index("C")
    return ndim - 1 if ndim == 3 else min(1, ndim - 1)


def pool(tensor: Tensor, layout: str | None, method: str, prefix: PrefixTokens = NO_PREFIX) -> Tensor:
    """Pool ``tensor`` over all dimensions except the batch and the channels.

    Args:
        tensor: a floating-point tensor: ``[N, C, H, W]``, ``[N, H, W, C]``, ``[N, C, T, H, W]``, tokens ``[N, L, C]``,
            …; ``[N, C]`` and ``[N]`` are returned unchanged.
        layout: layout as in :class:`~fxcore.extractor.OutputInfo`.
        method: ``avg``, ``max``, ``gem`` (generalised mean with exponent 3, over values clamped to be positive),
            ``cls`` (the class token) or :data:`DISTILLED`; or several joined by ``+``, whose vectors are concatenated
            in that order.
        prefix: the tokens before those to pool, which are left out as in timm's own pooling.

    Returns:
        ``[N, C]`` in the dtype of ``tensor``, or ``[N, k * C]`` for ``k`` methods; sums are accumulated in float32 or
        wider.

    Raises:
        BadTensor: the method is unknown, ``cls`` is used for values other than tokens with a class token, it is not
            known which tokens stand for positions, or the tensor is not floating-point.

    >>> pool(torch.arange(8.0).reshape(1, 2, 2, 2), "NCHW", "avg")
    tensor([[1.5000, 5.5000]])
    >>> pool(torch.tensor([[[9.0], [1.0], [2.0]]]), "tokens", "avg", PrefixTokens(1, class_token=True))
    tensor([[1.5000]])
    >>> pool(torch.tensor([[[9.0], [1.0], [2.0]]]), "tokens", "cls+avg", PrefixTokens(1, class_token=True))
    tensor([[9.0000, 1.5000]])
    """
    methods = method.split("+")
    for unknown in set(methods) - {*METHODS, DISTILLED}:
        raise BadTensor(f"there is no pooling {unknown!r}; there are {', '.join(METHODS)}", method=unknown)
    check_poolable(layout, tensor.ndim, tensor.dtype.is_floating_point, method, prefix)
    if len(methods) == 1:
        return _pool(tensor, layout, method, prefix)
    values = tensor if tensor.ndim > 1 else tensor[:, None]
    return torch.cat([_pool(values, layout, one, prefix) for one in methods], dim=1)


def _pool(tensor: Tensor, layout: str | None, method: str, prefix: PrefixTokens) -> Tensor:
    if tensor.ndim <= 2:
        return tensor
    accumulate = torch.promote_types(tensor.dtype, torch.float32)
    if method == "cls":
        return tensor[:, 0]
    if method == DISTILLED:
        return tensor[:, :2].mean(dim=1, dtype=accumulate).to(tensor.dtype)
    if prefix.count and tensor.ndim == 3:
        tensor = tensor[:, prefix.count :]
    channel = channel_dim(layout, tensor.ndim)
    spatial = [d for d in range(1, tensor.ndim) if d != channel]
    if method == "max":
        return tensor.amax(dim=spatial)
    if method == "avg":
        return tensor.mean(dim=spatial, dtype=accumulate).to(tensor.dtype)
    positive = tensor.to(accumulate).clamp(min=_GEM_FLOOR)
    return positive.pow(GEM_POWER).mean(dim=spatial).pow(1.0 / GEM_POWER).to(tensor.dtype)


def check_poolable(
    layout: str | None, ndim: int, floating: bool, method: str, prefix: PrefixTokens = NO_PREFIX
) -> None:
    """Check that :func:`pool` supports tensors with this layout, number of dimensions and prefix tokens.

    Raises:
        BadTensor: the method does not apply to such tensors.
    """
    methods = method.split("+")
    if not floating:
        raise BadTensor(f"pool={method} needs floating-point values; this node has integers or booleans, use pool=none")
    if "cls" in methods and (layout not in (TOKENS, None) or ndim != 3):
        raise BadTensor(
            f"pool={method} takes the class token and this node gives {layout or 'something else'}; use pool=avg",
            layout=layout,
        )
    if not prefix.known and ndim == 3:
        raise BadTensor(
            f"pool={method} needs to know which tokens stand for positions, and this node has others among or after "
            "them; use pool=none"
        )
    if "cls" in methods and not prefix.class_token:
        kept = f"{prefix.count} before those of the patches, none of them a class token" if prefix.count else "none"
        raise BadTensor(f"pool={method} takes the class token and the tokens of this node have {kept}; use pool=avg")


def pooled_shape(shape: list[int], layout: str | None, method: str) -> list[int]:
    """Return the shape of the result of :func:`pool` for a tensor of ``shape``."""
    many = len(method.split("+"))
    if len(shape) <= 2:
        return shape if many == 1 else [shape[0], many * math.prod(shape[1:])]
    return [shape[0], many * shape[2 if "cls" in method else channel_dim(layout, len(shape))]]


@dataclass(frozen=True)
class MapGrid:
    """The grid of a feature map over the model's input.

    Attributes:
        height, width: size of the map.
        stride_y, stride_x: input pixels from one position to the next.
        prefix: number of tokens before those of the grid.
    """

    height: int
    width: int
    stride_y: float
    stride_x: float
    prefix: int = 0

    def samples(self, boxes: Tensor, size: int) -> int:
        """Return the number of points that :func:`pool_regions` samples from each channel.

        For each position of the result, it samples as many points as the map has positions under it, at least one.

        Args:
            boxes: ``[n, 4]``: x1, y1, x2, y2 in input pixels.
            size: positions per side of the result.
        """
        across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        each = (across / self.stride_x / size).ceil().clamp(1) * (down / self.stride_y / size).ceil().clamp(1)
        return int(each.double().sum()) * size * size


def pool_regions(tensor: Tensor, layout: str | None, grid: MapGrid, boxes: Sequence[Tensor], size: int) -> Tensor:
    """Pool regions of feature maps with :func:`torchvision.ops.roi_align` and ``aligned=True``.

    Args:
        tensor: a floating-point tensor: ``[N, C, H, W]``, ``[N, H, W, C]``, or tokens ``[N, L, C]``.
        layout: layout as in :class:`~fxcore.extractor.OutputInfo`.
        grid: the grid of the map or of the tokens.
        boxes: ``[n, 4]`` for each of the N images: x1, y1, x2, y2 in input pixels.
        size: positions per side of the result.

    Returns:
        ``[boxes, C, size, size]``, channels first for all layouts, or ``[boxes, C]`` for a ``size`` of 1; in the dtype
        of ``tensor``, computed in float32 or wider.

    >>> grid = MapGrid(height=2, width=2, stride_y=16, stride_x=16)
    >>> pool_regions(torch.arange(4.0).reshape(1, 1, 2, 2), "NCHW", grid, [torch.tensor([[0.0, 0.0, 32.0, 32.0]])], 1)
    tensor([[1.5000]])
    """
    wide = _wide_maps(tensor, layout, grid)
    placed = [one.to(wide.device, wide.dtype) for one in boxes]
    scale = 1.0 / grid.stride_y
    if grid.stride_x != grid.stride_y:
        placed = [one * one.new_tensor([grid.stride_y / grid.stride_x, 1.0] * 2) for one in placed]
    pooled: Tensor = roi_align(wide, placed, (size, size), spatial_scale=scale, aligned=True)
    return (pooled.flatten(1) if size == 1 else pooled).to(tensor.dtype)


def pool_points(tensor: Tensor, layout: str | None, grid: MapGrid, points: Sequence[Tensor]) -> Tensor:
    """Sample feature maps at points with :func:`torch.nn.functional.grid_sample`.

    Sampling is bilinear with ``align_corners=False``, so that values fade to zero outside the outermost centres.

    Args:
        tensor, layout, grid: as for :func:`pool_regions`.
        points: ``[n, 2]`` for each of the N images: x, y in input pixels.

    Returns:
        ``[points, C]`` in the dtype of ``tensor``, computed in float32 or wider.

    >>> grid = MapGrid(height=2, width=2, stride_y=16, stride_x=16)
    >>> pool_points(torch.arange(4.0).reshape(1, 1, 2, 2), "NCHW", grid, [torch.tensor([[16.0, 8.0]])])
    tensor([[0.5000]])
    """
    wide = _wide_maps(tensor, layout, grid)
    size = wide.new_tensor([grid.stride_x * wide.shape[3], grid.stride_y * wide.shape[2]])
    sampled = [
        grid_sample(one, (2 * at.to(size.device, size.dtype) / size - 1)[None, None], align_corners=False)[0, :, 0].T
        for one, at in zip(torch.split(wide, 1), points, strict=True)
    ]
    return torch.cat(sampled).to(tensor.dtype)


def pool_masks(tensor: Tensor, layout: str | None, grid: MapGrid, weights: Sequence[Tensor]) -> Tensor:
    """Average feature maps over their positions by weights.

    Args:
        tensor, layout, grid: as for :func:`pool_regions`.
        weights: ``[n, height * width]`` for each of the N images; each row sums to 1.

    Returns:
        ``[masks, C]`` in the dtype of ``tensor``, computed in float32 or wider.

    >>> grid = MapGrid(height=2, width=2, stride_y=16, stride_x=16)
    >>> weights = [torch.tensor([[0.0, 0.5, 0.0, 0.5]])]
    >>> pool_masks(torch.arange(4.0).reshape(1, 1, 2, 2), "NCHW", grid, weights)
    tensor([[2.]])
    """
    wide = _wide_maps(tensor, layout, grid).flatten(2)
    averaged = [of.to(wide.device, wide.dtype) @ one.T for one, of in zip(wide, weights, strict=True)]
    return torch.cat(averaged).to(tensor.dtype)


def as_maps(tensor: Tensor, layout: str | None, grid: MapGrid | TokenGrid | None) -> Tensor:
    """Return maps, or tokens on ``grid``, as ``[N, C, H, W]``.

    Args:
        tensor: maps ``[N, C, H, W]`` or ``[N, H, W, C]``, or tokens ``[N, L, C]``.
        layout: layout as in :class:`~fxcore.extractor.OutputInfo`.
        grid: the positions of tokens; tokens before them are left out.
    """
    if layout != TOKENS:
        return tensor.movedim(channel_dim(layout, tensor.ndim), 1)
    assert grid is not None
    positions = tensor[:, grid.prefix :].transpose(1, 2)
    return positions.reshape(*positions.shape[:2], grid.height, grid.width)


def _wide_maps(tensor: Tensor, layout: str | None, grid: MapGrid) -> Tensor:
    """Return :func:`as_maps` in float32 or wider."""
    return as_maps(tensor, layout, grid).to(torch.promote_types(tensor.dtype, torch.float32))


def pooled_regions_shape(shape: list[int], layout: str | None, size: int) -> list[int]:
    """Return the shape of the result of :func:`pool_regions` for one box and a tensor of ``shape``.

    For a ``size`` of 1, it is also the shape for :func:`pool_points` and :func:`pool_masks`.
    """
    channels = shape[channel_dim(layout, len(shape))]
    return [1, channels] if size == 1 else [1, channels, size, size]
