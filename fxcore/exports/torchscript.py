"""TorchScript, by tracing: for programs that still load it. torch has deprecated it in favour of torch.export."""

from __future__ import annotations

import io
import warnings

import torch

from fxcore.exports.base import example, require_float
from fxcore.extractor import Extractor


def export_torchscript(extractor: Extractor) -> bytes:
    """The bytes of a ``.pt`` for ``torch.jit.load``; it returns the extractor's dict."""
    require_float(extractor, "torchscript")
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # Not strict: a dict that is returned is no state of the model.
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            extractor.module, example(extractor), strict=False, check_trace=False
        )
        torch.jit.save(traced, buffer)
    return buffer.getvalue()
