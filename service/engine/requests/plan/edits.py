"""Validation of a request's edits, and the sizes of their factors, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace

from fxcore.edits import BadEdit, Edit, PlannedFactors, numbered
from service.engine.description import Description
from service.engine.requests.plan.plan import Plan
from service.engine.rows.edits import Edits
from service.engine.rows.shapes import RowShape, RowSize
from service.engine.threads import in_pool


def check_editable(description: Description) -> None:
    """Check that an extractor supports edits, before it is built.

    Raises:
        BadEdit: it computes in int8.
    """
    if description.spec.precision == "int8":
        with numbered(0):
            raise BadEdit("an extractor in int8 has no inner values to edit; use one with precision=float32")


def resolved(edits: Sequence[Edit], resolve: Callable[[Mapping[str, str]], Mapping[str, str]]) -> list[Edit]:
    """Return ``edits`` with exact node names.

    Args:
        edits: the request's edits.
        resolve: maps keys to exact names, as the model's graph does.

    Raises:
        BadEdit: a node does not exist or does not have one row per image.
    """
    exact = []
    for index, edit in enumerate(edits):
        with numbered(index):
            [name] = resolve({edit.node: edit.node}).values()
        exact.append(replace(edit, node=name))
    return exact


@contextmanager
def at_fault(edits: Sequence[Edit]) -> Iterator[None]:
    """Add the index of the edit to the block's error for a node that cannot be edited.

    Args:
        edits: edits with exact node names.
    """
    try:
        yield
    except BadEdit as error:
        index = next((i for i, edit in enumerate(edits) if edit.node == error.extra.get("name")), None)
        if index is None or "edit" in error.extra:
            raise
        raise BadEdit(f"edit {index}: {error.detail}", **error.extra, edit=index) from None


class EditFactors:
    """The planned factors of a request's rows.

    Args:
        plan: the rows.
        factors: those of the rows of each shape, from :func:`planned_factors`.

    Attributes:
        bytes: bytes of the factors.
    """

    def __init__(self, plan: Plan, factors: Mapping[RowShape, Sequence[PlannedFactors]]) -> None:
        self._parts = plan.parts
        self._factors = factors
        self.bytes = sum(one.bytes for all in factors.values() for one in all)

    def make(self) -> Edits:
        """Compute the factors.

        Raises:
            BadEdit: the combined edits of a node overflow the dtype.
        """
        made = {shape: [one.make() for one in all] for shape, all in self._factors.items()}
        return Edits([made[part.shape] for part in self._parts for _ in part.rows])


async def planned_factors(
    description: Description, edits: Sequence[Edit], plan: Plan, sizes: Mapping[RowShape, RowSize], intake: Executor
) -> EditFactors:
    """Plan the factors of a request's rows, one shape at a time, so that other requests are served in between.

    Args:
        description: the extractor that edits these nodes.
        edits: edits with exact node names.
        plan: the rows.
        sizes: sizes of one row of each shape.
        intake: the threads to plan in.

    Raises:
        BadEdit: an edit selects something that the values do not have; ``extra["edit"]`` is its index.
    """
    rows = plan.shapes.total()

    def of(shape: RowShape) -> list[PlannedFactors]:
        size = None if description.begins_at else (shape[0][-2], shape[0][-1])
        edited = sizes[shape].edited  # the number of windows depends on the input size
        return [PlannedFactors(node, edits, rows, dims, size, description.dtype) for node, dims in edited]

    return EditFactors(plan, {shape: await in_pool(intake, of, shape) for shape in sizes})
