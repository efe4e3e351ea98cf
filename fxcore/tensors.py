"""Descriptions of tensors, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """A model's input: its name, its layout, and its shape with None for dynamic sizes.

    >>> import fxcore
    >>> fxcore.model_graph("squeezenet1_1").inputs
    (TensorSpec(name='x', layout='NCHW', shape=(None, 3, 224, 224)),)
    """

    name: str
    layout: str
    shape: tuple[int | None, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: Tensor) -> memoryview:
    """The row-major little-endian bytes of a CPU tensor; no copy if it is contiguous."""
    # By NumPy: each call into torch releases the GIL and has to acquire it again.
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
