"""NumPy's formats: npy for one array, npz (an uncompressed zip of npy files) for several."""

from __future__ import annotations

import functools
import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fxcore.tensors import raw_bytes
from service.codecs.tensors import shapes
from service.problems import BadTensor, Problem

MEDIA_TYPE = "application/x-npy"
NPZ_MEDIA_TYPE = "application/x-npz"

# Headers are parsed as Python literals; those written by numpy are shorter than 200 bytes.
_MAX_HEADER_BYTES = 4096

_REMEMBERED = 256
"""Maximum cached parsed headers: a client always sends the same ones, and parsing takes as long as routing."""

# Copied in steps, so that no step holds the GIL for long.
_STEP = 1024**2


def write(tensor: Tensor) -> list[bytes | memoryview]:
    """Return the parts of an npy file: its header, then the tensor's own memory, not copied."""
    return [_npy_header(tensor), raw_bytes(tensor)]


def write_npz(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return an npz file."""
    buffer = io.BytesIO()
    write_archive(buffer, {key: write(tensor) for key, tensor in tensors.items()})
    return [buffer.getbuffer()]


def write_archive(file: Path | IO[bytes], arrays: Mapping[str, Sequence[bytes | memoryview]]) -> None:
    """Write an npz file, given the parts of its npy files by key.

    ``numpy.savez`` is not used because it does not accept a key ``file``.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, parts in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as entry:
                for part in parts:
                    view = memoryview(part)
                    for start in range(0, len(view), _STEP):
                        entry.write(view[start : start + _STEP])


def read(body: bytearray) -> Tensor:
    """Return the array of an npy file, sharing the memory of ``body``. Nothing is unpickled.

    Raises:
        Problem: 422 ``bad-tensor``: it is not an npy file, its dtype (objects, strings, records) or shape is not
            supported, or its size does not match the header's shape. Checked before anything is allocated.
    """
    start = _header_bytes(body)
    shape, fortran, dtype = _header(bytes(body[:start]))
    if dtype.kind not in "buif":  # kind "O", objects, would be pickles
        raise _bad(f"arrays of {dtype} are not supported; send float32 or uint8")
    shapes.check(shape, "the array")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(body) - start:
        raise _bad(f"its header promises {expected} bytes of data, but {len(body) - start} follow")
    flat = np.frombuffer(body, dtype=dtype, offset=start) if expected else np.empty(0, dtype)
    array = flat.reshape(shape, order="F" if fortran else "C")
    try:
        return torch.from_numpy(np.ascontiguousarray(array.astype(dtype.newbyteorder("="), copy=False)))
    except TypeError as error:
        raise _bad(f"arrays of {dtype} are not supported; send float32 or uint8") from error


def _header_bytes(body: bytearray) -> int:
    """Return the offset of the data, according to the length in the header."""
    # Eight bytes of magic and version, then the length of the rest in two bytes, or in four from version 2.
    begin = 10 if body[6:7] <= b"\1" else 12
    return min(begin + int.from_bytes(body[8:begin], "little"), begin + _MAX_HEADER_BYTES)


@functools.lru_cache(_REMEMBERED)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, the order (True is Fortran's) and the dtype in a header.

    Raises:
        Problem: see :func:`read`.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(stream, max_header_size=_MAX_HEADER_BYTES)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(stream, max_header_size=_MAX_HEADER_BYTES)
    except Exception as error:  # parsing a crafted header as Python literals can raise anything
        raise _bad("its header cannot be read") from error
    raise _bad(f"format version {version[0]}.{version[1]} is not supported; save it as 1.0 or 2.0")


def has_numpy_dtype(dtype: torch.dtype) -> bool:
    """Return whether numpy supports the dtype: it does for all served ones except bfloat16."""
    return dtype is not torch.bfloat16


def _npy_header(tensor: Tensor) -> bytes:
    header = io.BytesIO()
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    np.lib.format.write_array_header_1_0(
        header,
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(tensor.shape)},
    )
    return header.getvalue()


def _bad(reason: str) -> Problem:
    return BadTensor(f"the body is not a supported npy file: {reason}")
