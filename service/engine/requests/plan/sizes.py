"""Sizes of a request's rows and of its response, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from service.engine.description import Description
from service.engine.device.job import cannot_stack
from service.engine.options import FeatureOptions
from service.engine.requests.plan.plan import Plan
from service.engine.rows.shapes import ResponseRow, RowShape, RowSize, row_layout
from service.engine.rows.tokens import has_tokens
from service.engine.runtime.runtime import Runtime
from service.engine.threads import in_pool
from service.problems import Ragged, RequestTooLarge, ResponseTooLarge


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
    description: Description,
    runtimes: Mapping[RowShape, Runtime],
    plan: Plan,
    counts: Mapping[RowShape, int],
    options: FeatureOptions,
    limit: int,
    intake: Executor,
) -> Sizes:
    """Predict the sizes of a request, one shape at a time, so that other requests are served in between.

    Args:
        description: the extractor's description.
        runtimes: the runtime that computes rows of each shape.
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
    first_shape = plan.parts[0].shape
    native = description.spec.fit == "native"
    first: Mapping[str, ResponseRow] = {}
    rows: dict[RowShape, RowSize] = {}
    lengths: set[int] = set()
    for shape, count in counts.items():
        of_runtime = runtimes[shape].sizes
        found = of_runtime.known(shape, options)
        if found is None:
            found = await in_pool(intake, of_runtime.predicted, shape, options)
        rows[shape], outputs = found
        first = first or outputs
        for key, output in outputs.items():
            if output.shape != first[key].shape:
                raise cannot_stack(description, key, first[key].shape[1:], output.shape[1:])
            if shape != first_shape and _is_of_places(output, options, native):
                raise _unlike_positions(key, first_shape[0], shape[0])
            total += count * output.bytes
            lengths.add(output.length)
    if total > limit and not options.sent:
        raise RequestTooLarge(total, limit)
    if total > limit:
        infos = [output.info for output in first.values()]
        choosable = all(has_tokens(row_layout(info.layout, info.rows_per_image), info.queries) for info in infos)
        raise ResponseTooLarge(total, limit, options.ways_to_shrink(plan.shapes.total(), len(first), choosable))
    return Sizes(rows, total, frozenset(lengths))


def _is_of_places(output: ResponseRow, options: FeatureOptions, native: bool) -> bool:
    """Return whether a row has one value per position.

    Such values of inputs of different sizes do not correspond.
    """
    info = output.info
    if options.tokens is not None:
        prefix = info.tokens.prefix if info.tokens is not None else info.prefix.count
        if max(options.tokens) >= prefix:
            return True
        if not info.queries:
            return False
    return native and not options.one_shape and (info.queries or _has_positions(output.shape))


def _has_positions(shape: Sequence[int]) -> bool:
    """Return whether a row of shape ``[1, ...]`` is more than a vector, such as a map or tokens."""
    return sum(size > 1 for size in shape[1:]) > 1


def _unlike_positions(key: str, first: tuple[int, ...], other: tuple[int, ...]) -> Ragged:
    """Return the error for outputs of the same shape whose positions belong to inputs of different sizes.

    Input shapes are ``[C, H, W]``, or others if the model begins at an inner node.
    """
    if len(first) == 3:
        sizes = " and ".join(f"{width} x {height}" for _, height, width in (first, other)) + " pixels"
    else:
        sizes = " and ".join(" x ".join(map(str, dims)) for dims in (first, other))
    return Ragged(
        f"output {key!r} has positions of inputs of different sizes ({sizes}), which do not correspond to each other",
        key,
    )
