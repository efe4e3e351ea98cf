"""Check that an exported file computes the same as its extractor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxcore.analysis.verify import verify
from fxcore.exports.captured import Captured, rows_of
from fxcore.exports.subject import CannotExport

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}


def require_agreement(extractor: Captured, run: Callable[..., Any], format: str, runtime: str) -> None:
    """Compare the outputs of a file with the extractor's on the example inputs, and on their first row alone, since
    the number of rows is dynamic.

    Args:
        run: runs the file on positional inputs, and returns its outputs in order, or as the extractor does.
        runtime: the package that runs it, for the error.

    Raises:
        CannotExport: an output differs.
    """
    limit = max(_TOLERANCE.get(x.dtype, _TOLERANCE[torch.float32]) for x in extractor.inputs)
    rows = rows_of(extractor.inputs)
    one = tuple(x[:1] if free else x for x, free in zip(extractor.inputs, rows, strict=True))
    for given in (extractor.inputs, one) if any(rows) else (extractor.inputs,):
        found = verify(extractor.module, run, given)
        if not found.relative <= limit:
            raise CannotExport(
                f"{extractor.model} has other values in {runtime}: relative error {found.relative:.1e}, over "
                f"{limit:.0e}",
                format=format,
                max_rel_error=found.relative,
            )
