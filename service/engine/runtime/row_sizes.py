"""Shapes and bytes of the rows of an extractor, predicted from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxcore.extractor import Extractor
from fxcore.graph.flops import FlopCounter
from fxcore.memory import LIVE_ACTIVATIONS
from fxcore.tensors import returned_dtype
from service.byte_cache import ByteCache
from service.engine.description import Description
from service.engine.options import FeatureOptions
from service.engine.rows.regions import grid_of
from service.engine.rows.shapes import ABOUT_USUAL, ResponseRow, RowShape, RowSize, row_values

SIZES_BYTES = 1024**2
"""Maximum bytes of each of an extractor's two size caches: row sizes and response sizes. The largest spec's fit."""

Predicted = tuple[RowSize, Mapping[str, ResponseRow]]
"""The sizes of a row, and by key the row of each returned output."""

OUTPUT_BYTES = 512
"""Approximate bytes of the Python objects for the name, shape and dtype of one output."""

_LONG = 64
"""Number of selected tokens above which a row's sizes are not cached: the cache counts all keys as equally large."""


class RowSizes:
    """Predicts the sizes of an extractor's rows and caches those of recent shapes. Thread-safe.

    Args:
        description: the extractor's description.
        extractor: the extractor.
    """

    def __init__(self, description: Description, extractor: Extractor) -> None:
        self._description = description
        self._extractor = extractor
        self._rows: ByteCache[RowShape, RowSize] = _cache(lambda row: len(row.outputs))
        self._responses: ByteCache[tuple[RowShape, FeatureOptions], Mapping[str, ResponseRow]] = _cache(len)

    @property
    def bytes(self) -> int:
        """Approximate bytes of the caches."""
        return self._rows.bytes + self._responses.bytes

    def row(self, shape: RowShape) -> RowSize:
        """Return the sizes of one row of ``shape``.

        Raises:
            BadTensor: the model does not accept that shape.
        """
        known = self._rows.get(shape)
        if known is None:
            known = self._row(shape)
            self._rows.put(shape, known)
        return known

    def known(self, shape: RowShape, options: FeatureOptions) -> Predicted | None:
        """Return the result of :meth:`predicted` if that is quick: if the sizes of such a row are cached."""
        row = self._rows.get(shape)
        if row is None:
            return None
        rows = self._responses.get((shape, options))
        return self.predicted(shape, options) if rows is None else (row, rows)

    def predicted(self, shape: RowShape, options: FeatureOptions) -> Predicted:
        """Predict a row of ``shape``.

        Raises:
            BadTensor: the model does not accept that shape, or an output not those options.
        """
        row, rows = self.row(shape), {}
        for info in self._extractor.outputs:
            if options.wants(info.key):
                dims, dtype, length = options.finished_row(info, *row.outputs[info.key], row.grids.get(info.key))
                rows[info.key] = ResponseRow(info, dims, _bytes(dims, dtype), length)
        if options.tokens is None or len(options.tokens) <= _LONG:
            self._responses.put((shape, options), rows)
        return row, rows

    def _row(self, shape: RowShape) -> RowSize:
        description, extractor = self._description, self._extractor
        usual = tuple(description.usual_shapes())
        ratio = row_values(shape) / max(1, row_values(usual))
        if shape == usual or ratio > ABOUT_USUAL:
            with FlopCounter() as counter:
                values = extractor.values_at(shape)
            flops = counter.total
        else:  # counting takes half as long as the rest
            values = extractor.values_at(shape)
            flops = int(ratio * self.row(usual).flops)
        own, cast = description.entry.dtype, description.dtype
        per_value = {node: (dims, returned_dtype(dtype, own, cast)) for node, (dims, dtype) in values.items()}
        outputs = {}
        for info in extractor.outputs:
            dims, dtype = per_value[info.node]
            several = info.rows_per_image > 1 or dims[0] != 1
            outputs[info.key] = ([1, *dims] if several else dims), dtype
        grids = {}
        if not description.begins_at:
            height, width = shape[0][-2:]
            strided = extractor.graph.input_size  # that the strides of its graph refer to
            grids = {i.key: grid_of(i, outputs[i.key][0], (height, width), strided) for i in extractor.outputs}
        inputs = sum(_bytes([1, *dims], description.dtype) for dims in shape)
        largest = max(_bytes(dims, dtype) for dims, dtype in per_value.values())
        whole = inputs + sum(_bytes(*o) for o in outputs.values()) + LIVE_ACTIVATIONS * largest
        whole += 2 * sum(_bytes(*per_value[node.name]) for node in extractor.edited)  # their factors
        maps = {key: grid for key, grid in grids.items() if grid is not None}
        edited = [(node, per_value[node.name][0]) for node in extractor.edited]
        return RowSize(outputs, max(1, whole), maps, edited, flops)  # the input may have no values


def _cache(outputs: Callable[[Any], int]) -> ByteCache[Any, Any]:
    return ByteCache(SIZES_BYTES, lambda size: OUTPUT_BYTES * (1 + outputs(size)))


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
