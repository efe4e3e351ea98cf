"""The edits of a request: factors and offsets applied to its rows at inner nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxcore.edits import Factors


@dataclass(frozen=True)
class Edits:
    """The factors of one request's rows.

    Attributes:
        factors: for each row, the factors of each edited node for all rows of its shape, in the order of the graph's
            inputs.
    """

    factors: Sequence[Sequence[Factors]]

    def of(self, rows: range) -> Iterator[Tensor]:
        """Yield scale and shift of each edited node for some rows, all of one shape."""
        for factors in self.factors[rows.start]:
            yield from factors.of(slice(rows.start, rows.stop))
