"""Detect torch.ao, which is deprecated and may be removed in any release (pytorch/ao#2259)."""

from __future__ import annotations

import importlib.util

MISSING = "torch's own int8 needs torch.ao, which this torch does not have"


def available() -> bool:
    """Return whether :mod:`fxcore.int8.graph_mode` and torchvision's quantized models can be imported, without
    importing them."""
    try:
        return importlib.util.find_spec("torch.ao.quantization.quantize_fx") is not None
    except (ImportError, ValueError, AttributeError):
        return False
