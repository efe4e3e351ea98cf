"""The JSON response: metadata, and each tensor in row-major order as numbers or as base64 of its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import orjson
import pybase64
import torch
from torch import Tensor

from fxcore.tensors import raw_bytes
from service.codecs.tensors.datatypes import V2_NAMES

MEDIA_TYPE = "application/json"

HEAD_BYTES = 8 * 1024
"""Maximum bytes of the head of a tensor in a response, with the objects that it is written from."""

# Written in steps of under a millisecond each, because orjson and base64 hold the GIL.
_NUMBERS_A_STEP = 32 * 1024
_BYTES_A_STEP = 3 * 256 * 1024  # a multiple of 3: base64 of the pieces is base64 of the whole


def write(
    document: Mapping[str, object], nodes: Mapping[str, str], outputs: Mapping[str, Tensor], encoding: str
) -> list[bytes | memoryview]:
    """Return the parts of ``document`` with ``outputs`` added.

    Args:
        document: the fields before ``outputs``.
        nodes: key → node name; outputs without a node are missing.
        outputs: key → CPU tensor. NaN and infinities become null, because JSON lacks them.
        encoding: ``json`` for numbers, ``base64`` for the little-endian bytes.
    """
    parts: list[bytes | memoryview] = [orjson.dumps(document)[:-1] + b',"outputs":[']
    for index, (key, tensor) in enumerate(outputs.items()):
        head = {"name": key, "node": nodes.get(key), "shape": list(tensor.shape), "datatype": V2_NAMES[tensor.dtype]}
        parts.append((b"," if index else b"") + orjson.dumps(head)[:-1] + b',"data":')
        parts += [*values(tensor, encoding), b"}"]
    parts.append(b"]}")
    return parts


def values(tensor: Tensor, encoding: str | None) -> list[bytes]:
    """Return the parts of a tensor's values: as ``base64`` of their little-endian bytes, or else as flat numbers.

    NaN and infinities become null.
    """
    return [b'"', *_base64(tensor), b'"'] if encoding == "base64" else [b"[", *_numbers(tensor), b"]"]


def _numbers(tensor: Tensor) -> Iterator[bytes]:
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _NUMBERS_A_STEP):
        piece = flat[start : start + _NUMBERS_A_STEP]
        # orjson writes the shortest decimal that reads back as the same float32; half floats are exact in float32.
        wide = piece.float() if piece.dtype in (torch.float16, torch.bfloat16) else piece
        text = orjson.dumps(np.ascontiguousarray(wide.numpy()), option=orjson.OPT_SERIALIZE_NUMPY)
        yield (b"," if start else b"") + text[1:-1]


def max_bytes(tensor: Tensor) -> int:
    """Return the maximum bytes of a tensor as numbers: ``-1.1754944e-38`` and a comma per value, and its head."""
    return HEAD_BYTES + 15 * tensor.numel()


def _base64(tensor: Tensor) -> Iterator[bytes]:
    view = raw_bytes(tensor)
    for start in range(0, len(view), _BYTES_A_STEP):
        yield pybase64.b64encode(view[start : start + _BYTES_A_STEP])
