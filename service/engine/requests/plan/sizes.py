"""Shapes and bytes of an extractor's outputs for inputs of a given shape, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import torch

from fxcore.extractor import OutputInfo
from fxcore.graph.flops import FlopCounter
from fxcore.memory import LIVE_ACTIVATIONS
from fxcore.tensors import returned_dtype
from service.engine.device.job import cannot_stack, unlike_positions
from service.engine.options import FeatureOptions
from service.engine.requests.plan.plan import Plan
from service.engine.rows.regions import grid_of
from service.engine.rows.shapes import ABOUT_USUAL, ResponseRow, RowShape, RowSize, row_layout, row_values, several_rows
from service.engine.rows.tokens import has_tokens
from service.engine.runtime.runtime import Runtime
from service.engine.threads import in_pool
from service.problems import RequestTooLarge, ResponseTooLarge

_LONG = 64
"""Number of selected tokens above which a row's sizes are not cached: the cache counts all keys as equally large."""


class Sizes(NamedTuple):
    """The predicted sizes of a request.

    Attributes:
        rows: sizes of one row of each shape.
        response: bytes of the response.
        lengths: numbers of values of the rows that ``project`` projects.
    """

    rows: dict[RowShape, RowSize]
    response: int
    lengths: frozenset[int]


async def sizes(
    runtime: Runtime,
    plan: Plan,
    counts: Mapping[RowShape, int],
    options: FeatureOptions,
    limit: int,
    intake: Executor,
) -> Sizes:
    """Predict the sizes of a request, one shape at a time, so that other requests are served in between.

    Args:
        runtime: the runtime that computes it.
        plan: its rows.
        counts: for each shape, the number of rows of the response: images or regions.
        options: how its outputs are processed.
        limit: maximum bytes of the response.
        intake: the threads that predict new shapes.

    Raises:
        BadTensor, Ragged: the options do not apply to an output, or rows of these shapes cannot form one tensor, or
            their positions do not correspond.
        ResponseTooLarge: the response exceeds ``limit``; RequestTooLarge if the outputs are not sent.
    """
    total = 0
    # Grids of 4 x 6 and 6 x 4 have the same number of tokens, but at different positions.
    native = runtime.description.spec.fit == "native"
    infos = {info.key: info for info in runtime.outputs}
    first_shape = plan.parts[0].shape
    first: Mapping[str, ResponseRow] = {}
    rows: dict[RowShape, RowSize] = {}
    lengths: set[int] = set()
    for shape, count in counts.items():
        if shape in runtime.at(shape).row_sizes:
            row, outputs = _predicted(runtime, shape, options)
        else:
            row, outputs = await in_pool(intake, _predicted, runtime, shape, options)
        rows[shape] = row
        first = first or outputs
        for key, output in outputs.items():
            if output.shape != first[key].shape:
                raise cannot_stack(runtime, key, [tuple(first[key].shape[1:]), tuple(output.shape[1:])])
            if shape != first_shape and _is_of_places(infos[key], output.shape, options, native):
                raise unlike_positions(key, first_shape[0], shape[0])
            total += count * output.bytes
            lengths.add(output.length)
    if total > limit and not options.sent:
        raise RequestTooLarge(total, limit)
    if total > limit:
        kinds = [(row_layout(infos[key].layout, infos[key].rows_per_image), infos[key].queries) for key in first]
        choosable = all(has_tokens(*kind) for kind in kinds)
        raise ResponseTooLarge(total, limit, options.ways_to_shrink(plan.shapes.total(), len(first), choosable))
    return Sizes(rows, total, frozenset(lengths))


def _predicted(runtime: Runtime, shape: RowShape, options: FeatureOptions) -> tuple[RowSize, Mapping[str, ResponseRow]]:
    """Return the size of one row of ``shape``, and its row of each returned output."""
    row = row_size(runtime, shape)
    return row, _response_rows(runtime, shape, row, options)


def row_size(runtime: Runtime, shape: RowShape) -> RowSize:
    """Return the size of one row of ``shape`` in ``runtime``; cached for recent shapes.

    Raises:
        BadTensor: the model does not accept that shape.
    """
    runtime = runtime.at(shape)
    known = runtime.row_sizes.get(shape)
    if known is None:
        usual = tuple(runtime.description.usual_shapes())
        ratio = row_values(shape) / max(1, row_values(usual))
        if shape == usual or ratio > ABOUT_USUAL:
            with FlopCounter() as counter:
                values = runtime.extractor.values_at(shape)
            flops = counter.total
        else:  # counting takes half as long as the rest
            values = runtime.extractor.values_at(shape)
            flops = int(ratio * row_size(runtime, usual).flops)
        own, cast = runtime.description.entry.dtype, runtime.description.dtype
        per_value = {node: (dims, returned_dtype(dtype, own, cast)) for node, (dims, dtype) in values.items()}
        outputs = {}
        for info in runtime.outputs:
            dims, dtype = per_value[info.node]
            outputs[info.key] = ([1, *dims] if several_rows(info, dims[0], 1) else dims), dtype
        grids = {}
        if not runtime.description.begins_at:
            height, width = shape[0][-2:]
            size = runtime.graph.input_size
            grids = {i.key: grid_of(i, outputs[i.key][0], (height, width), size) for i in runtime.outputs}
        inputs = sum(_bytes([1, *dims], runtime.description.dtype) for dims in shape)
        largest = max(_bytes(dims, dtype) for dims, dtype in per_value.values())
        whole = inputs + sum(_bytes(*o) for o in outputs.values()) + LIVE_ACTIVATIONS * largest
        edited = {node.name: per_value[node.name] for node in runtime.extractor.edited}
        whole += 2 * sum(_bytes(*value) for value in edited.values())  # their factors
        maps = {key: grid for key, grid in grids.items() if grid is not None}
        shapes = {name: dims for name, (dims, _) in edited.items()}
        known = RowSize(outputs, max(1, whole), maps, shapes, flops)  # the input may have no values
        runtime.row_sizes.put(shape, known)
    return known


def _response_rows(runtime: Runtime, shape: RowShape, row: RowSize, options: FeatureOptions) -> dict[str, ResponseRow]:
    """Return key → row of each returned output; cached for recent shapes and options."""
    runtime = runtime.at(shape)
    many = options.tokens is not None and len(options.tokens) > _LONG
    known = None if many else runtime.response_sizes.get((shape, options))
    if known is None:
        known = {}
        for info in runtime.outputs:
            if options.wants(info.key):
                dims, dtype, length = options.finished_row(info, *row.outputs[info.key], row.grids.get(info.key))
                known[info.key] = ResponseRow(dims, _bytes(dims, dtype), length)
        if not many:
            runtime.response_sizes.put((shape, options), known)
    return known


def _is_of_places(info: OutputInfo, dims: Sequence[int], options: FeatureOptions, native: bool) -> bool:
    """Return whether a row of shape ``dims`` has one value per position.

    Such values of inputs of different sizes do not correspond.
    """
    if options.tokens is not None:
        prefix = info.tokens.prefix if info.tokens is not None else info.prefix.count
        if max(options.tokens) >= prefix:
            return True
        if not info.queries:
            return False
    return native and not options.one_shape and (info.queries or _has_positions(dims))


def _has_positions(dims: Sequence[int]) -> bool:
    """Return whether a row of shape ``[1, ...]`` is more than a vector, such as a map or tokens."""
    return sum(size > 1 for size in dims[1:]) > 1


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
