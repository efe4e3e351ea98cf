"""The safetensors format: eight bytes of header length, a JSON header, then the tensors' memory.

The package safetensors copies every tensor in both directions while holding the GIL. Here, tensors share the memory of
the request's body and of the response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
import torch
from torch import Tensor

from fxcore.tensors import raw_bytes
from service.byte_cache import ByteCache
from service.codecs.tensors import shapes
from service.codecs.tensors.datatypes import SAFETENSORS_NAMES
from service.problems import BadTensor, Problem

MEDIA_TYPE = "application/x-safetensors"

# Headers hold names, dtypes and shapes of a few inputs; longer ones are malicious.
MAX_HEADER_BYTES = 1024**2
MAX_TENSORS = 256

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


_Entries = tuple[tuple[str, torch.dtype, torch.Size], ...]
_Metadata = tuple[tuple[str, str], ...]

# Headers of responses, which are the same for images of one size. A key takes up to three times the bytes of its header
# and a kilobyte. The largest header has two megabytes.
_heads: ByteCache[tuple[_Entries, _Metadata], tuple[bytes, list[str]]] = ByteCache(
    16 * 1024**2, lambda found: 1024 + 4 * len(found[0])
)


def write(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Return the parts of a file with ``tensors``: one header, then each tensor's own memory, not copied."""
    entries = tuple((key, tensor.dtype, tensor.shape) for key, tensor in tensors.items())
    key = entries, tuple(metadata.items())
    found = _heads.get(key)
    if found is None:
        found = _head(*key)
        _heads.put(key, found)
    head, order = found
    return [head, *(raw_bytes(tensors[key]) for key in order)]


def _head(tensors: _Entries, metadata: _Metadata) -> tuple[bytes, list[str]]:
    """Return the header, and the order of the tensors' memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for key, dtype, shape in tensors:
        header[key] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape)}
    # Wide dtypes first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    position = 0
    for key, dtype, shape in ordered:
        end = position + shape.numel() * dtype.itemsize
        header[key]["data_offsets"] = [position, end]
        position = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [key for key, _, _ in ordered]


def read(body: bytearray) -> dict[str, Tensor]:
    """Return the tensors of a file, sharing the memory of ``body``.

    Raises:
        Problem: 422 ``bad-tensor``: it is not a safetensors file. Its header is too long, is not JSON, or does not
            account for every byte after it exactly once.
    """
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > min(MAX_HEADER_BYTES, len(body) - 8):
        raise _bad("its header is cut short, or longer than 1 MiB")
    try:
        header = orjson.loads(memoryview(body)[8 : 8 + length])
    except orjson.JSONDecodeError as error:
        raise _bad("its header is not JSON") from error
    if not isinstance(header, dict):
        raise _bad("its header is not a JSON object")
    header.pop("__metadata__", None)
    if not 0 < len(header) <= MAX_TENSORS:
        raise _bad(f"it holds {len(header)} tensors; 1 to {MAX_TENSORS} are allowed")
    data_start = 8 + length
    spans: list[tuple[int, int]] = []
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        dtype, shape, start, end = _entry(name, entry)
        if end - start != math.prod(shape) * dtype.itemsize or end > len(body) - data_start:
            raise _bad(f"the bytes of tensor {name!r} do not match its shape and dtype")
        spans.append((start, end))
        tensors[name] = _view(body, data_start + start, dtype, shape)
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise _bad("its tensors overlap or leave gaps")
        position = end
    if position != len(body) - data_start:
        raise _bad("bytes follow its last tensor")
    return tensors


def _entry(name: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if (
            dtype in _DTYPES and type(start) is type(end) is int and 0 <= start <= end
        ):
            shapes.check(shape, f"tensor {name!r}")
            return _DTYPES[dtype], shape, start, end
    raise _bad(f"the header's entry of tensor {name!r} is not valid; supported dtypes: {', '.join(_DTYPES)}")


def _view(body: bytearray, start: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize:  # a view would be misaligned; rare, because headers are padded
        piece = bytearray(memoryview(body)[start : start + count * dtype.itemsize])
        return torch.frombuffer(piece, dtype=dtype).reshape(shape)
    return torch.frombuffer(body, dtype=dtype, count=count, offset=start).reshape(shape)


def _bad(reason: str) -> Problem:
    return BadTensor(f"the body is not a valid safetensors file: {reason}")
