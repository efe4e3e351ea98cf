"""Shapes and sizes of the rows of a batch, and outputs with several rows per image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fxcore.edits import EditedNode
from fxcore.extractor import OutputInfo
from fxcore.graph.axes.layout import TOKENS
from fxcore.pooling import MapGrid

RowShape = tuple[tuple[int, ...], ...]
"""Shape of one row of each model input, without the batch dimension."""

LARGEST_ROW = 8
"""Maximum memory to compute a row, as a multiple of ``max_batch_bytes``."""

ABOUT_USUAL = 2
"""Maximum values of a row of about the usual size, as a multiple of that size: a detector's images vary in aspect
ratio."""


@dataclass(frozen=True)
class RowSize:
    """The sizes of one row.

    Attributes:
        outputs: key → shape (with a batch dimension of 1) and dtype of each model output.
        bytes: bytes of its input, outputs and largest activations. Greater than zero, because batches are limited by
            it.
        grids: key → grid of each output that is a map.
        edited: each edited node, with the shape of its value.
        flops: FLOPs to compute it.
    """

    outputs: dict[str, tuple[list[int], torch.dtype]]
    bytes: int
    grids: dict[str, MapGrid]
    edited: Sequence[tuple[EditedNode, list[int]]]
    flops: int


def row_values(shapes: Iterable[Sequence[int]]) -> int:
    """Return the number of values of a row of these shapes."""
    return sum(map(math.prod, shapes))


class ResponseRow(NamedTuple):
    """One row of an output of the response; a row is an image or a region.

    Attributes:
        info: the output.
        shape: its shape, with a batch dimension of 1.
        bytes: its bytes.
        length: its number of values before a projection.
    """

    info: OutputInfo
    shape: list[int]
    bytes: int
    length: int


def by_image(info: OutputInfo, values: Tensor, images: int) -> Tensor:
    """Return ``values`` with one row per image: ``[N * k, …]`` of attention windows becomes ``[N, k, …]``."""
    if info.rows_per_image == 1 and values.shape[0] == images:
        return values
    return values.reshape(images, -1, *values.shape[1:])


def row_layout(layout: str | None, rows_per_image: int) -> str | None:
    """Return the layout of an output after :func:`by_image`; ``W`` is the windows of an image."""
    if rows_per_image == 1 or layout is None:
        return layout
    return "NWLC" if layout == TOKENS else "NW" + layout[1:]
