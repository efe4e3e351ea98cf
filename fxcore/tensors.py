"""Descriptions of tensors, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
"""Arguments of one call by position, all of them tensors."""

RETURNED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""The dtypes supported for outputs. Most formats have no complex numbers, and no floats of eight bits or less."""

_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def returned_dtype(made: torch.dtype, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an extractor returns a node's values.

    Args:
        made: dtype of the values in a graph that is annotated in ``own``.
        own: dtype of the model's parameters before they are cast. Values in another dtype are what the model's code
            converts to that dtype, whatever its parameters have.
        dtype: dtype of the extractor's parameters. Quantized values are dequantized.

    >>> returned_dtype(torch.float32, torch.float32, torch.bfloat16)
    torch.bfloat16
    >>> returned_dtype(torch.float64, torch.float32, torch.bfloat16)
    torch.float64
    >>> returned_dtype(torch.quint8, torch.float32, torch.float32)
    torch.float32
    """
    if made in _QUANTIZED:
        return torch.float32
    return dtype if made == own else made


@dataclass(frozen=True)
class TensorSpec:
    """An input: its name, layout, and shape with None for dynamic sizes.

    Attributes:
        node: the inner node that the input stands for; None for an input of the model.
        usual: for an inner node, the shape of one row at the usual image size.

    >>> import fxcore
    >>> fxcore.model_graph("squeezenet1_1").inputs
    (TensorSpec(name='x', layout='NCHW', shape=(None, 3, 224, 224), node=None, usual=()),)
    """

    name: str
    layout: str
    shape: tuple[int | None, ...]
    node: str | None = None
    usual: tuple[int, ...] = ()


def strided_parts(tensor: Tensor) -> Tensors:
    """Return the tensors whose storages hold ``tensor``: itself, or the indices and values of a sparse tensor.

    >>> [tuple(part.shape) for part in strided_parts(torch.eye(3).to_sparse())]
    [(2, 3), (3,)]
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the row-major little-endian bytes of a CPU tensor; no copy if it is contiguous."""
    # Use NumPy: each call into torch releases the GIL and has to reacquire it.
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")


def offsets(sizes: Iterable[int], alignment: int) -> list[int]:
    """Return the start of each of consecutive blocks of ``sizes`` bytes, aligned to ``alignment``, and the total bytes.

    >>> offsets([100, 0, 64], 64)
    [0, 128, 128, 192]
    """
    return list(accumulate((-(-size // alignment) * alignment for size in sizes), initial=0))
