"""Pass mutated request bodies of every kind through their parsers: each must be parsed or rejected.

This is a program, since a parser may crash its process: ``python -m tests.service.codecs.mutations COUNT SEED``. It
prints each body that raised an unexpected error or took over a second, and then ends with status 1.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import random
import sys
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import PIL.Image
import torch

from service.codecs import embeddings, v2
from service.codecs.requests import bodies, multipart
from service.codecs.tensors import safetensors
from service.problems import Problem
from service.schemas.v2 import TensorMetadata
from tests.peak_memory import peak

LIMIT = 1_000_000
INPUTS = [
    TensorMetadata(name="image", datatype="BYTES", shape=[-1]),
    TensorMetadata(name="x", datatype="FP32", shape=[-1, 3, 2, 2]),
]
MAX_SECONDS = 1.0
MAX_BYTES = 2 * 1024**3

ODD_VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, 0.5, "", "x", "\0", "é", "AAAA", "data:,",
    "data:;base64,", "https://x/y", [], [[]], {}, [None], {"x": 1}, [1, [2]], "a" * 300, [0] * 5000, [[1.0] * 9] * 700,
]  # fmt: skip
ODD_BYTES = [
    b"\0",
    b"\xff",
    b"\r\n",
    b"--",
    b"[",
    b"{",
    b'"',
    b",",
    b"[" * 2000,
    b"\xff" * 8,
    b"0",
    b"9" * 30,
    b"1e999",
]


def png() -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (4, 3), (1, 2, 3)).save(buffer, "png")
    return buffer.getvalue()


def npy_file(array: np.ndarray[Any, Any], version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version)
    return buffer.getvalue()


def form() -> bytes:
    part = b'--b\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    return part + png() + b"\r\n" + part + png() + b"\r\n--b--\r\n"


def binary_v2() -> tuple[bytes, int]:
    values = np.arange(12, dtype=np.float32).tobytes()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3, 2, 2], "parameters": {"binary_data_size": len(values)}}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "a", "parameters": {"binary_data": True}}]}).encode()
    return head + values, len(head)


TEXT = base64.b64encode(png()).decode()
DOCUMENTS: dict[str, list[Any]] = {
    "application/json": [
        {"images": [TEXT, f"data:image/png;base64,{TEXT}"]},
        {"images": [TEXT], "boxes": [[[0, 1, 2, 3], [0.5, 0, 4, 3]]]},
    ],
    "embeddings": [
        {"model": "m:a", "input": [TEXT, f"data:image/png;base64,{TEXT}"], "dimensions": 8, "encoding_format": "float"},
    ],
    "v2": [
        {"id": "1", "inputs": [{"name": "image", "datatype": "BYTES", "shape": [1, 2], "data": [[TEXT, TEXT]]}]},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3, 2, 2], "data": list(range(12))}],
         "outputs": [{"name": "a", "parameters": {"binary_data": True}}], "parameters": {"timeout": 5}},
        {"inputs": [{"name": "x", "datatype": "INT64", "shape": [9, 300], "data": [[1] * 300] * 9}]},
    ],
}  # fmt: skip
FILES: dict[str, list[bytes]] = {
    "multipart/form-data": [form()],
    "application/x-npy": [
        npy_file(np.zeros((1, 3, 2, 2), np.float32)),
        npy_file(np.asfortranarray(np.ones((2, 4, 3), np.uint8)), (2, 0)),
        npy_file(np.zeros(0, np.int64)),
    ],
    "application/x-safetensors": [
        b"".join(safetensors.write({"x": torch.ones(1, 3, 2, 2), "y": torch.ones(3, dtype=torch.uint8)}, {"a": "b"})),
    ],
    "v2 after JSON": [binary_v2()[0]],
    "v2 alone": [np.zeros(12, np.float32).tobytes(), png()],
    "v2 gzip": [zlib.compress(json.dumps(document).encode()) for document in DOCUMENTS["v2"]],
}


async def parse(kind: str, data: bytes, rng: random.Random) -> None:
    if kind == "embeddings":
        embeddings.read([data])
    elif kind == "multipart/form-data":

        async def chunks() -> AsyncIterator[bytes]:
            step = rng.choice((1, 7, 64, 10_000))
            for start in range(0, len(data), step):
                yield data[start : start + step]

        await multipart.read(chunks(), "b")
    elif kind.startswith("v2"):
        header = None
        if kind == "v2 after JSON":
            header = str(rng.choice((binary_v2()[1], len(data), rng.randrange(len(data) + 2))))
        elif kind == "v2 alone":
            header = "0"
        encoding = rng.choice(("deflate", "gzip")) if kind == "v2 gzip" else ""
        v2.read(v2.Body(bytearray(data), header, encoding, "application/json"), LIMIT, INPUTS)
    else:
        bodies.parse([data], kind, "x")


def mutated_document(document: Any, rng: random.Random) -> Any:
    """Replace, drop or repeat values anywhere in a JSON document."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.randint(1, 3)):
        place, key = None, None
        value = document
        while isinstance(value, (dict, list)) and value and (place is None or rng.random() < 0.7):
            place = value
            key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
            value = place[key]
        if place is None:
            return document
        odd = json.loads(json.dumps(rng.choice(ODD_VALUES)))
        match rng.randrange(5):
            case 0 if isinstance(place, list):
                place.extend([value] * rng.choice((1, 5, 2000)))
            case 1:
                del place[key]
            case 2 if isinstance(place, dict):
                place[rng.choice(("images", "boxes", "input", "shape", "data", "\0numbers", "x"))] = odd
            case _:
                place[key] = odd
    return document


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, cut, repeat and insert bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0:
                del changed[at:]
            case 1:
                del changed[at : at + rng.randint(1, 40)]
            case 2:
                changed[at:at] = changed[at : at + rng.randint(1, 40)] * rng.choice((1, 3, 100))
            case 3:
                changed[at:at] = rng.choice(ODD_BYTES)
            case 4 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 5 if at < len(changed):
                changed[at] = rng.randrange(256)
    return bytes(changed)


def body(rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choice([*DOCUMENTS, *FILES])
    if kind in FILES:
        return kind, mutated_bytes(rng.choice(FILES[kind]), rng)
    data = json.dumps(mutated_document(rng.choice(DOCUMENTS[kind]), rng)).encode()
    return kind, mutated_bytes(data, rng) if rng.random() < 0.3 else data


def main(count: int, seed: int) -> int:
    torch.set_num_threads(1)
    logging.disable()  # the form parser logs what it rejects
    rng = random.Random(seed)
    parsed, faults = 0, 0
    for _ in range(count):
        kind, data = body(rng)
        started = time.process_time()
        try:
            asyncio.run(parse(kind, data, rng))
            parsed += 1
        except Problem:
            pass
        except Exception as error:
            faults += 1
            print(f"{kind}: {error!r} of {data[:2000]!r}", flush=True)
        if time.process_time() - started > MAX_SECONDS:
            faults += 1
            print(f"{kind}: {time.process_time() - started:.1f} s for {data[:2000]!r}", flush=True)
    print(f"{count} bodies, {parsed} parsed, {faults} faults, peak {peak() / 1e6:.0f} MB")
    return int(faults > 0 or parsed == 0 or peak() > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
