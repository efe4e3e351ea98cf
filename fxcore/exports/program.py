"""Export to a ``torch.export.ExportedProgram`` with a dynamic number of rows."""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fxcore.exports.captured import Captured


def exported(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """Export ``module`` with a dynamic first dimension, the same for all inputs that have rows.

    Args:
        inputs: example inputs, with at least two rows for a dynamic dimension; torch.export specialises on size one.
    """
    rows, free = Dim("rows", min=1, max=1 << 16), rows_of(inputs)
    shapes = tuple({0: rows} if has else {} for has in free)
    try:
        with torch.no_grad():
            return torch.export.export(module, inputs, dynamic_shapes=shapes)
    except Exception:
        # Code that folds windows or frames into the rows has constraints that torch must derive.
        shapes_of_its_own = tuple({0: Dim.AUTO} if has else {} for has in free)
        with torch.no_grad():
            return torch.export.export(module, inputs, dynamic_shapes=shapes_of_its_own)


def rows_of(inputs: tuple[Tensor, ...]) -> list[bool]:
    """Return for each input whether it has as many rows as the first one, and more than one."""
    count = inputs[0].shape[0] if inputs and inputs[0].ndim else 0
    return [count > 1 and x.ndim > 0 and x.shape[0] == count for x in inputs]


def export_program(extractor: Captured) -> bytes:
    """Return the bytes of a ``.pt2`` file for ``torch.export.load``, whose program returns the extractor's dict."""
    buffer = io.BytesIO()
    torch.export.save(exported(extractor.module, extractor.inputs), buffer)
    return buffer.getvalue()
