"""Export to TorchScript by tracing. torch has deprecated it in favour of torch.export."""

from __future__ import annotations

import io
import warnings

import torch

from fxcore.exports.captured import Captured


def export_torchscript(extractor: Captured) -> bytes:
    """The bytes of a ``.pt`` file for ``torch.jit.load``; it returns the extractor's dict."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # Not strict, so that it may return a dict.
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            extractor.module, extractor.inputs, strict=False, check_trace=False
        )
        torch.jit.save(traced, buffer)
    return buffer.getvalue()
