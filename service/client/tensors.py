"""The safetensors of an answer, as arrays over the memory they were received in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

MEDIA_TYPE = "application/x-safetensors"
_BF16 = "BF16"
_BOX_IMAGE = "box_image"
"""The output that says whose image each row is of, where rows are boxes; the server gives no other that name then."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    _BF16: np.dtype(np.uint16),  # as bits, until it is known what it is to become
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


def views(content: NDArray[np.uint8]) -> dict[str, tuple[str, Array]]:
    """Key → dtype's name and array, in the order of the header; nothing is copied."""
    length = int(content[:8].view("<u8")[0])
    header = json.loads(content[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    found = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if end - begin != math.prod(entry["shape"]) * dtype.itemsize:
            raise ValueError(f"the answer's tensor {key!r} does not match its shape")
        found[key] = entry["dtype"], content[8 + length + begin : 8 + length + end].view(dtype).reshape(entry["shape"])
    return found


class Assembly:
    """The outputs of a call, put together from the answers to its requests in whatever order they come.

    Args:
        rows: of the whole call.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._arrays: dict[str, tuple[str, Array]] = {}
        self._loose: dict[str, dict[int, Array]] = {}
        self._lock = Lock()

    def put(self, start: int, content: NDArray[np.uint8], image: int = 0) -> None:
        """Take the answer to a request, whose first row is number ``start`` of the call, and its first image number
        ``image``."""
        for key, (name, part) in views(content).items():
            if key == _BOX_IMAGE:  # counted from the request's first
                part = part + image
            if len(part) == self._rows:
                self._arrays[key] = name, part
                continue
            with self._lock:
                if key not in self._arrays:
                    self._arrays[key] = name, np.empty((self._rows, *part.shape[1:]), part.dtype)
            whole = self._arrays[key][1]
            if whole.shape[1:] == part.shape[1:]:
                whole[start : start + len(part)] = part
            else:
                with self._lock:
                    self._loose.setdefault(key, {})[start] = part

    def arrays(self) -> dict[str, Any]:
        """The outputs; bfloat16, which numpy does not have, is widened to float32.

        Each is an array, or where images gave different shapes a list with one of each image.
        """
        return self._each(lambda name, array: _widened(array) if name == _BF16 else array)

    def tensors(self) -> dict[str, Any]:
        """The outputs as torch tensors over the same memory, bfloat16 as it is."""
        import torch

        def tensor(name: str, array: Array) -> torch.Tensor:
            if name == _BF16:
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

        return self._each(tensor)

    def _each(self, made: Callable[[str, Array], Any]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        for key, (name, whole) in self._arrays.items():
            if key not in self._loose:
                outputs[key] = made(name, whole)
                continue
            rows = list(whole)
            for start, part in self._loose[key].items():
                rows[start : start + len(part)] = list(part)
            outputs[key] = [made(name, row) for row in rows]
        return outputs


def _widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)
