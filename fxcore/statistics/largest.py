"""The images with the largest values of each channel, and the positions of these values in their maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_NONE = -torch.inf
"""Value of a rank that no image has yet; values of images are finite."""


class Entry(NamedTuple):
    """An image among those with the largest values of a channel.

    Attributes:
        channel: index of the channel, from 0.
        rank: rank of the image, from 1 for the largest value.
        path: path of the image.
        value: the channel's largest value in the image.
        place: indices of the value in the position dimensions; empty for vectors.
    """

    channel: int
    rank: int
    path: str
    value: float
    place: list[int]


def image_maxima(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each channel of each image, and its first position.

    Args:
        values: finite float64 ``[n, channels, …positions]``.

    Returns:
        float64 ``[n, channels]``, and int64 ``[n, channels, d]`` for ``d`` position dimensions.

    >>> image_maxima(torch.tensor([[[[1.0, 7.0], [7.0, 2.0]]]]).double())
    (tensor([[7.]], dtype=torch.float64), tensor([[[0, 1]]]))
    """
    sizes = values.shape[2:]
    flat = values.flatten(2) if sizes else values[..., None]
    # NumPy's argmax returns the first of equal values, torch's returns any.
    first = torch.from_numpy(flat.numpy().argmax(axis=2))
    maxima = flat.gather(2, first[..., None])[..., 0]
    places = torch.stack(torch.unravel_index(first, sizes), 2) if sizes else first.new_zeros(*first.shape, 0)
    return maxima, places


class Largest:
    """The images with the largest maxima of each channel; each image counts once.

    Equal values are ranked by path, so that the result does not depend on the order of the images or on how they are
    split and merged.

    Args:
        channels: number of channels.
        count: number of images to keep for each channel.
        dimensions: number of position dimensions.

    Attributes:
        values: float64 ``[channels, count]``, in descending order.
        images: int64 ``[channels, count]``, indices into ``paths``; -1 if there are fewer images.
        places: int64 ``[channels, count, dimensions]``, positions of the values.
        paths: paths of the images, sorted.

    >>> largest = Largest(1, 2, 0)
    >>> largest.add(["b", "a", "c"], torch.tensor([[5.0], [5.0], [1.0]]), torch.zeros(3, 1, 0, dtype=torch.int64))
    >>> [(entry.path, entry.value) for entry in largest]
    [('a', 5.0), ('b', 5.0)]
    """

    def __init__(self, channels: int, count: int, dimensions: int) -> None:
        self.values = torch.full((channels, count), _NONE, dtype=torch.float64)
        self.images = torch.full((channels, count), -1)
        self.places = torch.zeros((channels, count, dimensions), dtype=torch.int64)
        self.paths: list[str] = []

    @classmethod
    def of(cls, values: Tensor, images: Tensor, places: Tensor, paths: Sequence[str]) -> Largest:
        """Return a :class:`Largest` with these attributes."""
        largest = cls(0, 0, 0)
        largest.values, largest.images, largest.places, largest.paths = values, images, places, list(paths)
        return largest

    def add(self, paths: Sequence[str], maxima: Tensor, places: Tensor) -> None:
        """Add images that were not added before.

        Args:
            paths: paths of ``n`` images, all different.
            maxima, places: the result of :func:`image_maxima` for these images.
        """
        wanted = (maxima >= self.values[:, -1]).any(1).tolist()  # most of the first hundreds of images, few later
        chosen = [image for image, is_wanted in enumerate(wanted) if is_wanted]
        if chosen:
            values, images = maxima[chosen].T, torch.arange(len(chosen)).expand(maxima.shape[1], -1)
            self._merge(values, images, places[chosen].transpose(0, 1), [paths[image] for image in chosen])

    def merge(self, other: Largest) -> None:
        """Add the images of ``other``, which must have the same channels, count and dimensions, and other images."""
        self._merge(other.values, other.images, other.places, other.paths)

    def _merge(self, values: Tensor, images: Tensor, places: Tensor, paths: Sequence[str]) -> None:
        count = self.values.shape[1]
        united = sorted({*self.paths, *paths})
        number = {path: place for place, path in enumerate(united)}
        values = torch.cat([self.values, values], 1)
        images = torch.cat([_renumbered(self.images, self.paths, number), _renumbered(images, paths, number)], 1)
        places = torch.cat([self.places, places], 1)
        order = torch.from_numpy(np.lexsort((images.numpy(), -values.numpy()), axis=1)[:, :count].copy())
        self.values, images = values.gather(1, order), images.gather(1, order)
        self.places = places.gather(1, order[..., None].expand(-1, -1, places.shape[2]))
        kept = [united[image] for image in np.unique(images.numpy()).tolist() if image >= 0]
        self.images, self.paths = _renumbered(images, united, {path: place for place, path in enumerate(kept)}), kept

    def __iter__(self) -> Iterator[Entry]:
        columns = self.values.tolist(), self.images.tolist(), self.places.tolist()
        for channel, (values, images, places) in enumerate(zip(*columns, strict=True)):
            for place, (value, image) in enumerate(zip(values, images, strict=True)):
                if image >= 0:
                    yield Entry(channel, place + 1, self.paths[image], value, places[place])


def _renumbered(images: Tensor, paths: Sequence[str], number: Mapping[str, int]) -> Tensor:
    """Convert ``images``, indices into ``paths`` or -1, to the indices given by ``number``."""
    table = torch.tensor([*(number.get(path, -1) for path in paths), -1])
    return table[images]
