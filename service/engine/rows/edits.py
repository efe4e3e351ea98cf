"""The edits of a request: what its rows are multiplied by at inner nodes, and what is added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxcore.edits import Factors
from service.engine.rows.shapes import RowShape


@dataclass(frozen=True)
class Edits:
    """The factors of one request's rows.

    Attributes:
        factors: for rows of each shape those of each edited node, in the order of the graph's inputs.
        shapes: of the rows.
    """

    factors: Mapping[RowShape, Sequence[Factors]]
    shapes: Sequence[RowShape]

    def of(self, rows: range) -> Iterator[Tensor]:
        """Yield scale and shift of each edited node for some rows, which have one shape."""
        for factors in self.factors[self.shapes[rows.start]]:
            yield from factors.of(slice(rows.start, rows.stop))
