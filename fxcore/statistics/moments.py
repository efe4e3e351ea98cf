"""Mean, standard deviation and covariance of channels, in one pass and float64."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Mergeable count, mean, and sums of products of deviations from the mean.

    Each batch is reduced about its own mean, and batches are merged by the pairwise update of Chan, Golub and LeVeque
    ("Updating formulae and a pairwise algorithm for computing sample variances", 1979), whose rounding errors do not
    grow with the mean. A sum of squares minus the square of a sum would lose all digits if the mean is large.

    Args:
        channels: number of channels.
        covariance: whether to keep the covariance, ``[channels, channels]``, instead of only its diagonal.

    Attributes:
        count: number of values of each channel.
        mean: float64 ``[channels]``.
        products: float64 sums of products of deviations, ``[channels, channels]``, with ``covariance``; otherwise sums
            of squares, ``[channels]``.

    >>> moments = Moments(2, covariance=True)
    >>> moments.add(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    >>> moments.mean.tolist(), moments.cov().tolist()
    ([2.0, 4.0], [[2.0, 4.0], [4.0, 8.0]])
    """

    def __init__(self, channels: int, covariance: bool) -> None:
        self.count = 0
        self.mean = torch.zeros(channels, dtype=torch.float64)
        self.products = torch.zeros((channels, channels) if covariance else channels, dtype=torch.float64)

    @classmethod
    def of(cls, count: int, mean: Tensor, products: Tensor) -> Moments:
        """Return the moments with these attributes."""
        moments = cls(0, covariance=False)
        moments.count, moments.mean, moments.products = count, mean, products
        return moments

    def add(self, values: Tensor) -> None:
        """Add values.

        Args:
            values: finite ``[n, channels]`` of any dtype.
        """
        if not len(values):
            return
        deviations = values.double()
        mean = deviations.mean(0)
        deviations = deviations - mean
        products = deviations.T @ deviations if self.products.ndim == 2 else deviations.square().sum(0)
        self.merge(Moments.of(len(values), mean, products))

    def merge(self, other: Moments) -> None:
        """Add all values of ``other``, which must have the same channels and kind of products."""
        count = self.count + other.count
        if not count:
            return
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / count)
        between = torch.outer(delta, delta) if self.products.ndim == 2 else delta.square()
        self.products = self.products + other.products + between * (self.count * (other.count / count))
        self.count = count

    def std(self) -> Tensor:
        """Return the standard deviation ``[channels]``, with ``count - 1`` in the denominator like :func:`torch.std`;
        NaN for a single value."""
        squares = self.products.diagonal() if self.products.ndim == 2 else self.products
        return (squares / self._freedom).sqrt()

    def cov(self) -> Tensor:
        """Return the covariance ``[channels, channels]``, like :func:`torch.cov` and :func:`numpy.cov`."""
        assert self.products.ndim == 2
        return self.products / self._freedom

    @property
    def _freedom(self) -> Tensor:
        return torch.tensor(max(self.count - 1, 0), dtype=torch.float64)
