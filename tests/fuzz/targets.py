"""The parsers of untrusted bytes, each as a function that may raise only its documented errors.

If there is another implementation of the format, accepted values must equal those that it reads.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import cache

import numpy as np
import safetensors.torch
import torch

from fxcore.errors import BadImage, ImageTooLarge, UnknownNode
from fxcore.graph.model_graph import ModelGraph, model_graph
from fxcore.images.decoding import Decoder, decode
from fxcore.images.files import image_header, open_image
from fxcore.images.preprocessing import ImagePreprocessing
from fxcore.images.presets import ImageClassification
from service.codecs import compression, v2
from service.codecs.negotiation import choose, media_type
from service.codecs.requests import multipart
from service.codecs.tensors import npy
from service.codecs.tensors import safetensors as our_safetensors
from service.http.middleware.request_context import request_id
from service.http.routes.v1.features import named_nodes
from service.problems import Problem
from service.schemas.specs import ExtractorSpec
from service.schemas.v2 import TensorMetadata
from tests.hostile_images import HOSTILE, deep_png, gif_over_its_canvas, gif_past_its_colours, photo, saved

LIMIT = 200_000
DECODER = Decoder(ImagePreprocessing(ImageClassification(crop_size=8, resize_size=8)))


def image(data: bytes) -> None:
    """Fuzz the decoders: images that PIL and simplejpeg decode must have the size given in the header."""
    try:
        height, width = image_header(data, LIMIT)[:2]
    except (BadImage, ImageTooLarge):
        return
    try:
        decoded = open_image(data, LIMIT)
        assert decoded.size == (width, height)
        assert decoded.mode == "RGB"
    except BadImage:
        pass
    with suppress(BadImage):
        assert decode(data, LIMIT).shape == (height, width, 3)
    with suppress(BadImage):
        assert DECODER.image(data, LIMIT).numel() == 3 * 8 * 8


def npy_body(data: bytes) -> None:
    """Fuzz npy bodies: numpy must read the same, without unpickling."""
    try:
        tensor = npy.read(bytearray(data))
    except Problem:
        return
    array = np.load(io.BytesIO(data), allow_pickle=False)
    np.testing.assert_array_equal(tensor.numpy(), array.astype(array.dtype.newbyteorder("=")))


def safetensors_body(data: bytes) -> None:
    """Fuzz safetensors bodies: the format's own library must read the same."""
    try:
        tensors = our_safetensors.read(bytearray(data))
    except Problem:
        return
    reference = safetensors.torch.load(data)
    assert tensors.keys() == reference.keys()
    for key, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (reference[key].dtype, reference[key].shape)
        assert torch.equal(tensor.view(-1).view(torch.uint8), reference[key].reshape(-1).view(torch.uint8))


INPUTS = [
    TensorMetadata(name="image", datatype="BYTES", shape=[-1]),
    TensorMetadata(name="x", datatype="FP32", shape=[-1, 3, 4, 4]),
]


def v2_body(data: bytes) -> None:
    """Fuzz V2 requests: the first two bytes give the length of the JSON, or 0xFFFF if all of the body is JSON."""
    length = int.from_bytes(data[:2], "little")
    header = None if length == 0xFFFF else str(length)
    encoding = "gzip" if data[2:4] == b"\x1f\x8b" else ""
    try:
        request = v2.read(v2.Body(bytearray(data[2:]), header, encoding, ""), LIMIT, INPUTS)
    except Problem:
        return
    assert request.bytes <= 8 * LIMIT  # a digit and a comma may be eight bytes


def multipart_body(data: bytes) -> None:
    """Fuzz multipart bodies, in pieces of one byte more than the value of the first byte."""

    async def pieces() -> AsyncIterator[bytes]:
        step = 1 + data[0] if data else 1
        for start in range(1, len(data), step):
            yield data[start : start + step]

    try:
        files = asyncio.run(multipart.read(pieces(), "b"))
    except Problem:
        return
    assert sum(map(len, files)) <= len(data)


def compressed_body(data: bytes) -> None:
    """Fuzz gzip and deflate bodies, which must unpack to at most the limit."""
    for encoding in compression.ENCODINGS:
        try:
            unpacked = compression.decompress(bytearray(data), encoding, LIMIT)
        except Problem:
            continue
        assert len(unpacked) <= LIMIT


@cache
def graph() -> ModelGraph:
    return model_graph("squeezenet1_1")


def node_names(data: bytes) -> None:
    """Fuzz names of nodes, from the query to a spec and to the single node that each resolves to."""
    text = data.decode("utf-8", "replace")
    try:
        named = named_nodes(text)
    except Problem:
        return
    ExtractorSpec(model="squeezenet1_1", return_nodes=named)
    for name in named:
        with suppress(UnknownNode):
            assert graph().resolve([name])[name] in graph().eval_nodes


# Shapes without elements; except in the first, the product of the other sizes overflows.
NOTHING = [[0, 2**39], [0, 2**62], [0, 2**63], [2**39, 2**39, 0], [0, 2**62, 2**62]]

OFFERED = ["application/json", "application/x-safetensors", "image/png"]


def header_values(data: bytes) -> None:
    """Fuzz Content-Type, Accept and X-Request-ID."""
    text = data.decode("latin-1")
    media_type(text)
    with suppress(Problem):
        assert choose(text, OFFERED) in OFFERED
    assert request_id(text).isascii()
    assert request_id(text).isprintable()


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _npy_of_nothing(shape: list[int]) -> bytes:
    buffer = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def _safetensors(x: list[int], y: list[int], size: int) -> bytes:
    """Build a file of two tensors of four bytes at these offsets."""
    entries = {"x": x, "y": y}
    header = json.dumps({k: {"dtype": "U8", "shape": [4], "data_offsets": v} for k, v in entries.items()}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def _safetensors_of_nothing(shape: list[int]) -> bytes:
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return len(header).to_bytes(8, "little") + header


def _v2(text: bytes, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(2, "little") + text + rest


def _v2_of_nothing(shape: list[int]) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape}
    return _v2(json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 0}}]}).encode())


def _images() -> list[bytes]:
    small = photo(size=(24, 16))
    formats = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
    names = ("exif that loops", "exif of gigabytes", "tiff of gigabytes", "no data", "gif says it is large")
    odd = [deep_png(color) for color in (0, 2, 4, 6)] + [gif_over_its_canvas(), gif_past_its_colours()]
    return [saved(small, format) for format in formats] + odd + [HOSTILE[name][0]() for name in names]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "image": (image, _images),
    "npy": (
        npy_body,
        lambda: [
            *(_npy(np.arange(6).astype(t).reshape(1, 2, 3)) for t in ("u1", "f4", ">f2", "?")),
            *map(_npy_of_nothing, NOTHING),
        ],
    ),
    "safetensors": (
        safetensors_body,
        lambda: [
            safetensors.torch.save({"x": torch.ones(1, 2), "y": torch.zeros(3, dtype=torch.uint8)}),
            _safetensors([0, 4], [2, 6], 6),  # they overlap
            _safetensors([0, 4], [5, 9], 9),  # they leave a gap
            _safetensors([0, 4], [4, 8], 9),  # a byte follows
            *map(_safetensors_of_nothing, NOTHING),
        ],
    ),
    "v2": (
        v2_body,
        lambda: [
            _v2(b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[1],"data":["/9j/"]}]}'),
            _v2(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}],"outputs":[{"name":"C5"}]}'),
            _v2(
                b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}}]}', bytes(8)
            ),
            _v2(b"", bytes(192)),
            *map(_v2_of_nothing, NOTHING),
        ],
    ),
    "multipart": (
        multipart_body,
        lambda: [b'\x07--b\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\nxyz\r\n--b--\r\n'],
    ),
    "compressed": (
        compressed_body,
        lambda: [b"".join(compression.compress([bytes(1000)], encoding)) for encoding in compression.ENCODINGS],
    ),
    "nodes": (
        node_names,
        lambda: [b"features.2:a,C3", b"features", b"classifier.1,x", b"__metadata__,x:a", b"x:a\0b,C3"],
    ),
    "headers": (
        header_values,
        lambda: [b"image/png;q=0.1, */*;q=0", b'multipart/form-data; boundary="a\\"b"; x=1', b"a, b;q=1.5"],
    ),
}
