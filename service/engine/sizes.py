"""What an extractor will make of inputs of a given shape, known before anything is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxcore.extractor import OutputInfo
from fxcore.layout import TOKENS
from fxcore.memory import LIVE_ACTIVATIONS
from service.engine.batching import cannot_stack
from service.engine.errors import ResponseTooLarge
from service.engine.inputs import RowShape
from service.engine.options import FeatureOptions

if TYPE_CHECKING:
    from service.engine.records import ExtractorRecord

_CACHED_SHAPES = 256
_CACHED_OPTIONS = 64


@dataclass(frozen=True)
class RowSize:
    """What one row takes.

    Attributes:
        outputs: key → shape (with a first dimension of 1) and dtype of the model's outputs.
        bytes: input, outputs and largest activations; above zero, as batches are measured out by it.
        answered: what :func:`answer_bytes` found for the options that were asked for.
    """

    outputs: dict[str, tuple[list[int], torch.dtype]]
    bytes: int
    answered: dict[FeatureOptions, dict[str, tuple[list[int], int]]] = field(default_factory=dict)


def row_size(record: ExtractorRecord, shape: RowShape) -> RowSize:
    """What one row of ``shape`` takes in ``record``; remembered for the shapes that were asked for last.

    Raises:
        BadTensor: the model does not take that shape.
    """
    known = record.row_sizes.get(shape)
    if known is None:
        values = record.graph.values_at(shape, set(record.return_nodes.values()))
        per_value = {
            node: (dims, record.dtype if dtype.is_floating_point else dtype) for node, (dims, dtype) in values.items()
        }
        outputs = {}
        for info in record.outputs:
            dims, dtype = per_value[info.node]
            outputs[info.key] = ([1, *dims] if _several_rows(info, dims[0], 1) else dims), dtype
        inputs = sum(_bytes([1, *dims], record.dtype) for dims in shape)
        largest = max(_bytes(dims, dtype) for dims, dtype in per_value.values())
        whole = inputs + sum(_bytes(*o) for o in outputs.values()) + LIVE_ACTIVATIONS * largest
        known = RowSize(outputs, max(1, whole))  # an image may have no pixels
        while len(record.row_sizes) >= _CACHED_SHAPES:
            record.row_sizes.pop(next(iter(record.row_sizes)), None)
        record.row_sizes[shape] = known
    return known


def answer_bytes(record: ExtractorRecord, shapes: Sequence[RowShape], options: FeatureOptions, limit: int) -> int:
    """How many bytes the answer to rows of ``shapes`` has.

    Raises:
        BadTensor: the options make no sense for an output, or rows of these shapes do not form one tensor.
        ResponseTooLarge: more than ``limit``.
    """
    total = 0
    first = _answered(record, shapes[0], options)
    for shape, rows in Counter(shapes).items():
        for key, (dims, size) in _answered(record, shape, options).items():
            if dims != first[key][0]:
                raise cannot_stack(key, [tuple(first[key][0][1:]), tuple(dims[1:])])
            total += rows * size
    if total > limit:
        raise ResponseTooLarge(total, limit, options.ways_to_shrink(len(shapes), len(first)))
    return total


def _answered(record: ExtractorRecord, shape: RowShape, options: FeatureOptions) -> dict[str, tuple[list[int], int]]:
    """key → shape and bytes of what one row is answered with; remembered with the row's size."""
    row = row_size(record, shape)
    known = row.answered.get(options)
    if known is None:
        known = {}
        for info in record.outputs:
            if options.wants(info.key):
                dims, dtype = row.outputs[info.key]
                layout = row_layout(info)
                options.check(info.key, dims, dtype, layout)
                dims, dtype = options.finished(dims, dtype, layout)
                known[info.key] = dims, _bytes(dims, dtype)
        if len(row.answered) >= _CACHED_OPTIONS:
            row.answered.clear()
        row.answered[options] = known
    return known


def by_image(info: OutputInfo, values: Tensor, images: int) -> Tensor:
    """``values`` with one row an image; attention windows, several an image, come as ``[N * k, …]`` → ``[N, k, …]``."""
    if not _several_rows(info, values.shape[0], images):
        return values
    return values.reshape(images, -1, *values.shape[1:])


def row_layout(info: OutputInfo) -> str | None:
    """The layout of what :func:`by_image` gives, ``W`` being the windows of an image."""
    if info.rows_per_image == 1 or info.layout is None:
        return info.layout
    return "NWLC" if info.layout == TOKENS else "NW" + info.layout[1:]


def _several_rows(info: OutputInfo, rows: int, images: int) -> bool:
    return info.rows_per_image > 1 or rows != images


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
