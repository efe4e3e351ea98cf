"""The edits of a request: factors and offsets applied to its rows at inner nodes."""

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
        factors: for each row shape, the factors of each edited node, in the order of the graph's inputs.
        shapes: shapes of the rows.
    """

    factors: Mapping[RowShape, Sequence[Factors]]
    shapes: Sequence[RowShape]

    def of(self, rows: range) -> Iterator[Tensor]:
        """Yield scale and shift of each edited node for some rows, all of one shape."""
        for factors in self.factors[self.shapes[rows.start]]:
            yield from factors.of(slice(rows.start, rows.stop))
