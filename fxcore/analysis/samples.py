"""Compare tensors, or parts of them that are enough to tell them apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAME, CLOSE = 1e-4, 2e-3
"""Maximum differences relative to a tensor's largest magnitude: for the same operations, and for other kernels."""

_SAMPLED = 4096
"""Approximate number of elements of a value to compare."""


def near(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    """Return whether two tensors differ by at most ``tolerance``, relative to the largest magnitude of the first."""
    if expected.shape != found.shape:
        return False
    if expected.numel() == 0:
        return True
    if expected.dtype.is_floating_point:
        tolerance = max(tolerance, 16 * torch.finfo(expected.dtype).eps)
    kind = torch.complex128 if expected.is_complex() else torch.float64
    x, y = (plain(t).to(kind) for t in (expected, found))
    same = (x == y) | (x.isnan() & y.isnan())
    scale = x.abs().masked_fill(~x.abs().isfinite(), 0).max()
    return bool((same | ((x - y).abs() <= tolerance * scale)).all())


@dataclass(frozen=True)
class Sample:
    """A part of a tensor that is enough to distinguish it from another."""

    shape: torch.Size
    dtype: torch.dtype
    part: Tensor

    @classmethod
    def of(cls, value: Tensor) -> Sample:
        return cls(value.shape, value.dtype, sampled(value).clone())

    def agrees(self, other: Sample) -> bool:
        return (self.shape, self.dtype) == (other.shape, other.dtype) and near(self.part, other.part, SAME)


def sampled(value: Tensor) -> Tensor:
    """Return evenly spaced elements; an odd step visits all channels in turn."""
    elements = plain(value).flatten()
    return elements[:: max(1, elements.numel() // _SAMPLED) | 1]


def plain(value: Tensor) -> Tensor:
    """Return the values of a quantized or sparse tensor as a plain one."""
    if value.is_quantized:
        return value.dequantize()
    return value if value.layout in (torch.strided, torch.jagged) else value.to_dense()
