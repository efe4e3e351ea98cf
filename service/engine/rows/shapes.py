"""The rows of a batch: their shapes, their sizes, and which of them belong to one image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxcore.extractor import OutputInfo
from fxcore.graph.layout import TOKENS
from fxcore.pooling import MapGrid

RowShape = tuple[tuple[int, ...], ...]
"""The shape of one row of each input of a model, without the first dimension."""


@dataclass(frozen=True)
class RowSize:
    """The sizes of one row.

    Attributes:
        outputs: key → shape (with a first dimension of 1) and dtype of the model's outputs.
        bytes: of its input, outputs and largest activations; above zero, as batches are limited by it.
        grids: key → the grid of each output that is a map.
        edited: node → shape of its value, of edited ones.
    """

    outputs: dict[str, tuple[list[int], torch.dtype]]
    bytes: int
    grids: dict[str, MapGrid]
    edited: dict[str, list[int]]


@dataclass(frozen=True)
class ResponseSize:
    """The sizes of one row of the response, which is an image or a region.

    Attributes:
        outputs: key → shape and bytes of each output that is answered.
    """

    outputs: dict[str, tuple[list[int], int]]


def by_image(info: OutputInfo, values: Tensor, images: int) -> Tensor:
    """``values`` with one row an image; attention windows, several an image, come as ``[N * k, …]`` → ``[N, k, …]``."""
    if not several_rows(info, values.shape[0], images):
        return values
    return values.reshape(images, -1, *values.shape[1:])


def row_layout(layout: str | None, rows_per_image: int) -> str | None:
    """Return the layout of what :func:`by_image` gives for such an output, ``W`` being the windows of an image."""
    if rows_per_image == 1 or layout is None:
        return layout
    return "NWLC" if layout == TOKENS else "NW" + layout[1:]


def several_rows(info: OutputInfo, rows: int, images: int) -> bool:
    """Return whether an output of ``rows`` rows for ``images`` images has several rows for each image."""
    return info.rows_per_image > 1 or rows != images
