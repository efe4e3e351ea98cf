"""The bytes of a tensor, without a copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """The row-major little-endian bytes of a CPU tensor: its own memory where it is contiguous, as the engine's are."""
    # By NumPy: each call into torch releases the GIL and has to wait for it again.
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
