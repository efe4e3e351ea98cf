"""Conversion of arguments to arrays, and decoding of safetensors responses into views of the receive buffer."""

from __future__ import annotations

import json
import math
import sys
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
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    _BF16: np.dtype(np.uint16),  # raw bits: NumPy has no bfloat16
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


def tensor_views(content: NDArray[np.uint8]) -> dict[str, tuple[str, Array]]:
    """Decode safetensors without copying: key → dtype name and array, in the order of the header.

    Raises:
        ValueError: it is something else, or damaged.
    """
    found = {}
    try:
        length = int(content[:8].view("<u8")[0])
        header = json.loads(content[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        data = content[8 + length :]
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            if not 0 <= begin <= end <= len(data) or end - begin != math.prod(entry["shape"]) * dtype.itemsize:
                raise ValueError(f"tensor {key!r} does not match its shape, or is not within the response")
            found[key] = entry["dtype"], data[begin:end].view(dtype).reshape(entry["shape"])
    except Exception as error:  # a header may be damaged in many ways
        raise ValueError(f"not safetensors, or damaged: {error!r}") from error
    return found


class Assembly:
    """Assembles the outputs of a call from the responses to its requests, in any order. Thread-safe.

    Args:
        rows: number of rows of the whole call.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._keys: set[str] | None = None
        self._arrays: dict[str, tuple[str, Array]] = {}
        self._parts: dict[str, dict[int, Array]] = {}
        self._lock = Lock()

    def put(
        self, start: int, stop: int, content: NDArray[np.uint8], image: int = 0, indices: str | None = None
    ) -> None:
        """Add the response to one request.

        Args:
            start: index of its first row in the call.
            stop: index after its last row.
            content: the response body.
            image: index of its first image in the call.
            indices: name of the output with the image index of each region, if there is one; the server reserves the
                name.

        Raises:
            ValueError: it is not safetensors, or does not have these rows or the outputs of the other responses.
        """
        views = tensor_views(content)
        with self._lock:
            if self._keys is None:
                self._keys = set(views)
        if self._keys != set(views):  # rows would have no values
            raise ValueError(f"outputs {sorted(views)}, and {sorted(self._keys)} in another response")
        for key, (name, part) in views.items():
            if part.shape[:1] != (stop - start,):
                raise ValueError(f"{key!r} has the shape {part.shape} for {stop - start} rows")
            if key == indices:  # indices within the request
                part = part + image
            with self._lock:
                if len(part) == self._rows:
                    self._arrays[key] = name, part
                    continue
                if key not in self._arrays:
                    self._arrays[key] = name, np.empty((self._rows, *part.shape[1:]), part.dtype)
            whole = self._arrays[key][1]
            if whole.shape[1:] == part.shape[1:]:
                whole[start:stop] = part
            else:
                with self._lock:
                    self._parts.setdefault(key, {})[start] = part

    def arrays(self) -> dict[str, Any]:
        """Return the outputs as NumPy arrays, with bfloat16 widened to float32.

        Each is an array, or a list of one array per image if their shapes differ.
        """
        return self._each(lambda name, array: _widened(array) if name == _BF16 else array)

    def tensors(self) -> dict[str, Any]:
        """Return the outputs as torch tensors that share the memory of the arrays; bfloat16 is kept."""
        import torch

        def tensor(name: str, array: Array) -> torch.Tensor:
            if name == _BF16:
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

        return self._each(tensor)

    def _each(self, convert: Callable[[str, Array], Any]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        for key, (name, whole) in self._arrays.items():
            if key not in self._parts:
                outputs[key] = convert(name, whole)
                continue
            rows = list(whole)
            for start, part in self._parts[key].items():
                rows[start : start + len(part)] = list(part)
            outputs[key] = [convert(name, row) for row in rows]
        return outputs


def _widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def is_instance(module: str, name: str, value: Any) -> bool:
    """Return ``isinstance`` for a class of an optional library, without importing it."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def to_array(value: Any) -> Array:
    """Convert an array, a torch tensor or nested lists; bfloat16 becomes float32."""
    if isinstance(value, np.ndarray):
        return value
    if is_instance("torch", "Tensor", value):
        torch = sys.modules["torch"]
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    return np.asarray(value)
