"""Names of dtypes on the wire."""

from __future__ import annotations

import torch

# The Open Inference Protocol's names, which JSON responses use too.
V2_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}

SAFETENSORS_NAMES = {
    dtype: name.replace("UINT", "U").replace("INT", "I").replace("FP", "F") for dtype, name in V2_NAMES.items()
}

# NumPy has no bfloat16.
NUMPY_DTYPES = {
    name: torch.empty(0, dtype=dtype).numpy().dtype for dtype, name in V2_NAMES.items() if dtype is not torch.bfloat16
}
