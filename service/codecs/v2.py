"""The Open Inference Protocol's wire format: JSON, then raw little-endian tensors in the order of the JSON.

``Inference-Header-Content-Length`` is the length of the JSON. Without it the whole body is JSON; 0 means that the body
has no JSON and is the model's only input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import torch
from pydantic import ValidationError
from torch import Tensor

from fxcore.tensors import raw_bytes
from service.codecs.compression import decompress
from service.codecs.requests import image_text
from service.codecs.tensors import json, shapes
from service.codecs.tensors.datatypes import NUMPY_DTYPES, V2_NAMES
from service.codecs.tensors.numbers import Document, flat
from service.problems import BadTensor, InvalidRequest, Unsupported
from service.schemas.problems import invalid_body
from service.schemas.v1.features import MAX_IMAGES
from service.schemas.v2 import InferRequest, RequestInput, TensorMetadata

BYTES = "BYTES"
IMAGE = "image"

_DTYPES = {name: dtype for dtype, name in V2_NAMES.items()}
_SMALL_JSON = 16 * 1024
_SMALL_BODY = 256 * 1024


@dataclass(frozen=True)
class Body:
    """A request's body and its headers.

    Attributes:
        data: the body as sent.
        header: the value of ``Inference-Header-Content-Length``, or None.
        encoding: the value of ``Content-Encoding``: ``gzip``, ``deflate`` or empty.
        media_type: the Content-Type without parameters.
    """

    data: bytearray
    header: str | None
    encoding: str
    media_type: str

    @property
    def small(self) -> bool:
        """Whether reading it takes less time than switching threads twice.

        Images and tensors are only copied; JSON is parsed.
        """
        size = len(self.data)
        header = self.header or ""
        json_size = int(header) if header.isdecimal() and len(header) < 20 else size
        return not self.encoding and size <= _SMALL_BODY and json_size <= _SMALL_JSON


@dataclass
class Wanted:
    """A requested output; all of them if ``name`` is None."""

    name: str | None
    binary: bool


@dataclass
class Request:
    """A parsed request: the inputs, either encoded images or tensors by name, and the requested outputs."""

    images: list[bytes] | None
    tensors: dict[str, Tensor]
    outputs: list[Wanted]
    id: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of the inputs, which exceed those of the body if it was compressed or JSON."""
        return sum(map(len, self.images or ())) + sum(tensor.nbytes for tensor in self.tensors.values())


def read(body: Body, limit: int, inputs: Sequence[TensorMetadata]) -> Request:
    """Parse a body. Time and memory are proportional to its unpacked size.

    Args:
        limit: maximum bytes it may unpack to.
        inputs: the model's inputs.

    Raises:
        Problem: 413 or 422.
    """
    data = decompress(body.data, body.encoding, limit) if body.encoding else body.data
    length = _json_length(body.header, len(data))
    image = body.media_type.startswith("image/")
    if length == 0 or (length is None and image):
        return _read_raw(data, inputs, image)
    document = Document(data, len(data) if length is None else length)
    try:
        request = InferRequest.model_validate(document.value)
    except ValidationError as error:
        raise invalid_body(error) from error
    images, tensors = _inputs(request, document, data, len(data) if length is None else length, inputs)
    return Request(images, tensors, list(_wanted(request)), request.id, request.parameters)


def write(
    document: Mapping[str, Any], outputs: Mapping[str, Tensor], binary: Mapping[str, bool]
) -> tuple[list[bytes | memoryview], int | None]:
    """Return the parts of a response, and the length of its JSON if raw tensors follow.

    Args:
        document: the fields before ``outputs``.
        outputs: key → CPU tensor. NaN and infinities become null, because JSON lacks them.
        binary: key → whether its values follow the JSON as raw bytes.
    """
    head: list[bytes | memoryview] = [orjson.dumps(document)[:-1] + b',"outputs":[']
    tail: list[memoryview] = []
    for index, (key, tensor) in enumerate(outputs.items()):
        entry: dict[str, Any] = {"name": key, "datatype": V2_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        if binary[key]:
            entry["parameters"] = {"binary_data_size": tensor.nbytes}
            tail.append(raw_bytes(tensor))
        head.append((b"," if index else b"") + orjson.dumps(entry))
        if not binary[key]:
            head[-1] = bytes(head[-1])[:-1] + b',"data":'
            head += [*json.values(tensor, "json"), b"}"]
    head.append(b"]}")
    return [*head, *tail], sum(map(len, head)) if any(binary.values()) else None


def _inputs(
    request: InferRequest, document: Document, data: bytearray, position: int, inputs: Sequence[TensorMetadata]
) -> tuple[list[bytes] | None, dict[str, Tensor]]:
    """Return the encoded images or the tensors of a request.

    Raw ones begin at ``position`` and fill the rest of ``data``.
    """
    images: list[bytes] | None = None
    tensors: dict[str, Tensor] = {}
    for entry in request.inputs:
        where = f"input {entry.name!r}"
        if entry.name in tensors or (entry.name == IMAGE and images is not None):
            raise BadTensor(f"{where} is sent twice")
        size = _binary_size(entry, where)
        if size is not None and position + size > len(data):
            raise BadTensor(f"{where}: the body ends before its {size} bytes")
        if entry.datatype == BYTES:
            if entry.name != IMAGE:
                raise BadTensor(f"{where}: BYTES are encoded images and must be named {IMAGE!r}")
            images = _images(entry, data, position, size, where)
        elif entry.name == IMAGE and [spec.datatype for spec in inputs if spec.name == IMAGE] == [BYTES]:
            raise BadTensor(f"{where} must be BYTES (encoded images), not {entry.datatype!r}")
        else:
            tensors[entry.name] = _tensor(document, entry, data, position, size, where)
        position += size or 0
    if position != len(data):
        raise BadTensor(f"{len(data) - position} bytes follow the last tensor")
    if images is not None and tensors:
        raise BadTensor(f"{IMAGE!r} and {next(iter(tensors))!r} are alternative inputs; send only one")
    return images, tensors


def _json_length(header: str | None, size: int) -> int | None:
    if header is None:
        return None
    # int() would accept "+1", "1_0" and any number of digits.
    length = int(header) if header.isascii() and header.isdigit() and len(header) < 20 else -1
    if not 0 <= length <= size:
        raise InvalidRequest(f"Inference-Header-Content-Length is {header[:40]!r}, but the body has {size} bytes")
    return length


def _read_raw(data: bytearray, inputs: Sequence[TensorMetadata], image: bool) -> Request:
    """Read a body without JSON.

    A whole number of rows of the model's input is that input. Anything else, and any ``image/*``, is one encoded
    image.
    """
    everything = [Wanted(None, True)]
    tensors = [spec for spec in inputs if spec.datatype != BYTES]
    if not image and len(tensors) == 1 and -1 not in tensors[0].shape[1:]:
        row = math.prod(tensors[0].shape[1:])
        rows, rest = divmod(len(data), 4 * row)
        if rows and not rest:
            values = torch.frombuffer(data, dtype=torch.float32).reshape(rows, *tensors[0].shape[1:])
            return Request(None, {tensors[0].name: values}, everything)
    if len(tensors) == len(inputs):
        raise BadTensor("a body without JSON must be one input of known size; describe this model's inputs in JSON")
    return Request([bytes(data)], {}, everything)


def _binary_size(entry: RequestInput, where: str) -> int | None:
    if "shared_memory_region" in entry.parameters:
        raise Unsupported(f"{where}: shared memory is not available here; send the values in the request")
    size = entry.parameters.get("binary_data_size")
    if size is None:
        if entry.data is None:
            raise BadTensor(f"{where} has neither data nor binary_data_size")
        return None
    if type(size) is not int or size < 0:
        raise BadTensor(f"{where}: binary_data_size must be a number of bytes")
    if entry.data is not None:
        raise BadTensor(f"{where} has both data and binary_data_size; send one")
    return size


def _images(entry: RequestInput, data: bytearray, start: int, size: int | None, where: str) -> list[bytes]:
    count = math.prod(entry.shape)
    if count not in entry.shape:
        raise BadTensor(f"{where} has the shape {entry.shape}; encoded images must have [n], one per element")
    if count > MAX_IMAGES:
        raise BadTensor(f"{where} has {count} images; send at most {MAX_IMAGES} at a time")
    if size is not None:
        return _elements(data, start, size, count, where)
    strings = flat(entry.data)  # may be nested like the shape
    if len(strings) != count or not all(isinstance(text, str) for text in strings):
        raise BadTensor(f"{where}: its shape needs {count} strings, but its data is something else")
    return image_text.decode(strings)


def _elements(data: bytearray, start: int, size: int, count: int, where: str) -> list[bytes]:
    """Split BYTES elements: each is four bytes of length, then the element."""
    elements: list[bytes] = []
    end = start + size
    view = memoryview(data)
    while start < end and len(elements) < count:
        length = int.from_bytes(view[start : min(start + 4, end)], "little")
        start += 4
        if start + length > end:
            raise BadTensor(f"{where}: element {len(elements)} is longer than the bytes that remain")
        elements.append(bytes(view[start : start + length]))
        start += length
    if start != end or len(elements) != count:
        raise BadTensor(f"{where}: its shape needs {count} elements, but its {size} bytes hold a different number")
    return elements


def _tensor(
    document: Document, entry: RequestInput, data: bytearray, start: int, size: int | None, where: str
) -> Tensor:
    dtype = _DTYPES.get(entry.datatype)
    if dtype is None:
        raise BadTensor(
            f"{where}: datatype {entry.datatype!r} is not supported; use one of {', '.join(_DTYPES)}, {BYTES}"
        )
    shapes.check(entry.shape, where)
    count = math.prod(entry.shape)
    if size is None:
        if entry.datatype not in NUMPY_DTYPES:
            raise BadTensor(f"{where}: {entry.datatype} must be sent as binary data")
        return torch.from_numpy(document.numbers(entry.data, count, entry.datatype, where)).reshape(entry.shape)
    if size != count * dtype.itemsize:
        needed = count * dtype.itemsize
        raise BadTensor(
            f"{where}: {entry.datatype} {entry.shape} needs {needed} bytes, but binary_data_size is {size}",
        )
    if size == 0:
        return torch.empty(entry.shape, dtype=dtype)
    # Copied, because the JSON before it may leave it unaligned; numpy copies without the GIL.
    values = np.empty(size, np.uint8)
    values[:] = np.frombuffer(data, np.uint8, size, start)
    if dtype is torch.bool:
        return torch.from_numpy(values != 0).reshape(entry.shape)
    return torch.from_numpy(values).view(dtype).reshape(entry.shape)


def _wanted(request: InferRequest) -> Iterator[Wanted]:
    binary = _flag(request.parameters, "binary_data_output", False)
    if not request.outputs:
        yield Wanted(None, binary)
    for output in request.outputs or ():
        for parameter in ("shared_memory_region", "classification"):
            if output.parameters.get(parameter):
                raise Unsupported(f"output {output.name!r}: {parameter} is not available here")
        yield Wanted(output.name, _flag(output.parameters, "binary_data", binary))


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"parameter {name!r} must be true or false")
    return value
