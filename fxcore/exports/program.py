"""Export to a ``torch.export.ExportedProgram`` with a dynamic number of rows."""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fxcore.exports.agreement import require_agreement
from fxcore.exports.captured import Captured, rows_of


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
        shapes_of_its_own = tuple({0: Dim.DYNAMIC} if has else {} for has in free)
        with torch.no_grad():
            return torch.export.export(module, inputs, dynamic_shapes=shapes_of_its_own)


def export_program(extractor: Captured) -> bytes:
    """Return the bytes of a ``.pt2`` file for ``torch.export.load``, whose program returns the extractor's dict.

    Raises:
        CannotExport: the program's outputs differ from the extractor's.
    """
    program = exported(extractor.module, extractor.inputs)
    require_agreement(extractor, program.module(), "torch_export", "torch.export")
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()
