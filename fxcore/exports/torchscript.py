"""Export to TorchScript by tracing. torch has deprecated it in favour of torch.export."""

from __future__ import annotations

import io

import torch

from fxcore.exports.captured import Captured
from fxcore.quiet import quiet


def export_torchscript(extractor: Captured) -> bytes:
    """The bytes of a ``.pt`` file for ``torch.jit.load``; it returns the extractor's dict."""
    buffer = io.BytesIO()
    with quiet(), torch.no_grad():
        # Not strict, so that it may return a dict.
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            extractor.module, extractor.inputs, strict=False, check_trace=False
        )
        torch.jit.save(traced, buffer)
    return buffer.getvalue()
