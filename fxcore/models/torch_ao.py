"""Detect torch.ao, which is deprecated and may be removed in any release (pytorch/ao#2259)."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator

import torch

_ENGINE_LOCK = threading.RLock()

MISSING = "torch's own int8 needs torch.ao, which this torch does not have"


def available() -> bool:
    """Return whether :mod:`fxcore.int8.graph_mode` and torchvision's quantized models can be imported, without
    importing them."""
    try:
        return importlib.util.find_spec("torch.ao.quantization.quantize_fx") is not None
    except (ImportError, ValueError, AttributeError):
        return False


@contextlib.contextmanager
def same_engine() -> Iterator[None]:
    """Keep ``torch.backends.quantized.engine`` within the block, if other threads set it within such blocks only.

    It is restored on exit, because torchvision's builders of int8 models set it for the whole process. Layers that were
    packed for one engine work with any.
    """
    with _ENGINE_LOCK:
        engine = torch.backends.quantized.engine
        try:
            yield
        finally:
            torch.backends.quantized.engine = engine
