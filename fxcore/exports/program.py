"""``torch.export``: an ExportedProgram that ``torch.export.load`` reads, for any number of rows."""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fxcore.exports.captured import Captured


def exported(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """``module`` captured with a free first dimension, the same for all inputs that have rows.

    Args:
        inputs: at least two rows where their number is to be free; one row would be taken for a constant.
    """
    rows, free = Dim("rows", min=1, max=1 << 16), rows_of(inputs)
    shapes = tuple({0: rows} if has else {} for has in free)
    try:
        with torch.no_grad():
            return torch.export.export(module, inputs, dynamic_shapes=shapes)
    except Exception:
        # Windows and frames are folded into the rows by code that asks for equalities; torch may choose them itself.
        shapes_of_its_own = tuple({0: Dim.AUTO} if has else {} for has in free)
        with torch.no_grad():
            return torch.export.export(module, inputs, dynamic_shapes=shapes_of_its_own)


def rows_of(inputs: tuple[Tensor, ...]) -> list[bool]:
    """Which inputs have rows, as many as the first one has, and more than one."""
    count = inputs[0].shape[0] if inputs and inputs[0].ndim else 0
    return [count > 1 and x.ndim > 0 and x.shape[0] == count for x in inputs]


def export_program(extractor: Captured) -> bytes:
    """The bytes of a ``.pt2``; its module returns the extractor's dict."""
    buffer = io.BytesIO()
    torch.export.save(exported(extractor.module, extractor.inputs), buffer)
    return buffer.getvalue()
