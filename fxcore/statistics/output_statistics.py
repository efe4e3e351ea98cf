"""The statistics of one output of an extractor over many images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcore.errors import FxError
from fxcore.pooling import channel_dim
from fxcore.statistics.largest import Largest, image_maxima
from fxcore.statistics.moments import Moments

_MOMENTS = ("moments.count", "moments.mean", "moments.products")
_LARGEST = ("largest.values", "largest.images", "largest.places")


def by_channel(values: Tensor, layout: str | None, prefix: int = 0) -> Tensor:
    """Return values with their channels in dimension 1.

    Args:
        values: ``[n, …]`` of any dtype; ``[n]`` is one channel.
        layout: layout as in :class:`~fxcore.extractor.OutputInfo`; None if unknown.
        prefix: number of prefix tokens to leave out, as poolings do.

    Returns:
        float64 ``[n, channels, …positions]``.

    >>> by_channel(torch.zeros(2, 50, 768), "tokens", prefix=1).shape
    torch.Size([2, 768, 49])
    """
    if values.ndim == 1:
        return values[:, None].double()
    if values.ndim == 3:
        values = values[:, prefix:]
    return values.movedim(channel_dim(layout, values.ndim), 1).double().contiguous()


class OutputStatistics:
    """Moments over all images and positions, and the images with the largest values of each channel.

    Attributes:
        moments: the moments; None if not requested.
        largest: the images with the largest values; None if not requested.
    """

    def __init__(self, moments: Moments | None, largest: Largest | None) -> None:
        self.moments = moments
        self.largest = largest

    @classmethod
    def empty(cls, values: Tensor, *, moments: bool, covariance: bool, top: int) -> OutputStatistics:
        """Return statistics of no images.

        Args:
            values: values of any images, from :func:`by_channel`.
            moments: whether to compute count, mean and standard deviation.
            covariance: whether to compute the covariance as well.
            top: number of images to keep for each channel; 0 for none.
        """
        channels = values.shape[1]
        return cls(
            Moments(channels, covariance) if moments or covariance else None,
            Largest(channels, top, values.ndim - 2) if top else None,
        )

    @property
    def channels(self) -> int:
        """Number of channels."""
        if self.moments is not None:
            return len(self.moments.mean)
        return 0 if self.largest is None else len(self.largest.values)

    def takes(self, values: Tensor) -> bool:
        """Return whether ``values`` have the position dimensions of these statistics."""
        return self.largest is None or self.largest.places.shape[2] == values.ndim - 2

    def add(self, paths: Sequence[str], values: Tensor) -> None:
        """Add images.

        Args:
            paths: paths of ``n`` images, all different; used only by :attr:`largest`.
            values: finite float64 ``[n, channels, …positions]``, from :func:`by_channel`.
        """
        if self.moments is not None:
            self.moments.add(values.flatten(2).transpose(1, 2).flatten(0, 1) if values.ndim > 2 else values)
        if self.largest is not None:
            self.largest.add(paths, *image_maxima(values))

    def merge(self, other: OutputStatistics) -> None:
        """Add the images of ``other``, statistics of the same kinds over other images.

        Raises:
            FxError: the numbers of channels differ.
        """
        if self.channels != other.channels:
            raise FxError(f"statistics of {self.channels} and of {other.channels} channels cannot be merged")
        if self.moments is not None and other.moments is not None:
            self.moments.merge(other.moments)
        if self.largest is not None and other.largest is not None:
            self.largest.merge(other.largest)

    def state(self) -> tuple[dict[str, Tensor], list[str]]:
        """Return the state as tensors and the paths of images; see :meth:`from_state`."""
        tensors: dict[str, Tensor] = {}
        if (moments := self.moments) is not None:
            values = torch.tensor(moments.count), moments.mean, moments.products
            tensors |= dict(zip(_MOMENTS, values, strict=True))
        if (largest := self.largest) is not None:
            tensors |= dict(zip(_LARGEST, (largest.values, largest.images, largest.places), strict=True))
        return tensors, [] if largest is None else largest.paths

    @classmethod
    def from_state(cls, tensors: dict[str, Tensor], paths: Sequence[str]) -> OutputStatistics:
        """Restore statistics from their :meth:`state`."""
        moments = largest = None
        if _MOMENTS[0] in tensors:
            count, mean, products = (tensors[name] for name in _MOMENTS)
            moments = Moments.of(int(count), mean, products)
        if _LARGEST[0] in tensors:
            values, images, places = (tensors[name] for name in _LARGEST)
            largest = Largest.of(values, images, places, paths)
        return cls(moments, largest)
