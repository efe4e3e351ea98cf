"""What a call is given → the bodies of its requests.

Encoded images (paths, bytes) are sent as they are, pixels and preprocessed tensors as arrays. A call becomes as many
requests as its size asks for; a body is only made when it is sent, so that a thousand paths are not read at once.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from service.client.tensors import MEDIA_TYPE

Array = NDArray[Any]

# Modes that PNG holds as they are; the server makes RGB of them as it does of files.
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGBA")


@dataclass(frozen=True)
class Encoded:
    """An encoded image: its bytes, or the file they are in."""

    data: bytes | Path
    nbytes: int

    def read(self) -> bytes:
        return self.data.read_bytes() if isinstance(self.data, Path) else self.data


Item = Encoded | Array
"""An encoded image, or an array whose first dimension is images."""


Boxes = list[list[list[float]]]


@dataclass(frozen=True)
class Part:
    """What one request carries: images ``start`` to ``start + rows`` of the call, and where there are boxes, those of
    these images, the first of which is number ``first_box`` of the call."""

    start: int
    rows: int
    content: list[Encoded] | list[Array] | dict[str, Array]
    boxes: Boxes | None = None
    first_box: int = 0

    @property
    def place(self) -> int:
        """The first row of its answer in that of the call."""
        return self.start if self.boxes is None else self.first_box

    @property
    def end(self) -> int:
        """The row after its last."""
        return self.place + (self.rows if self.boxes is None else sum(map(len, self.boxes)))

    def body(self) -> tuple[bytes, str]:
        """The bytes to send and their content type."""
        if self.boxes is not None:
            images = [base64.b64encode(item.read()).decode() for item in self.content if isinstance(item, Encoded)]
            return json.dumps({"images": images, "boxes": self.boxes}).encode(), "application/json"
        if isinstance(self.content, dict):
            return safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in self.content.items()}), MEDIA_TYPE
        files = [item.read() for item in self.content if isinstance(item, Encoded)]
        if not files:
            return _npy([item for item in self.content if not isinstance(item, Encoded)])
        if len(files) == 1 and files[0]:
            return files[0], "image/*"
        boundary = uuid.uuid4().hex
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n\r\n'.encode()
        pieces = [piece for data in files for piece in (head, data, b"\r\n")]
        return b"".join([*pieces, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"

    def split(self, rows: int) -> list[Part]:
        """The same as parts of at most ``rows`` images."""
        if isinstance(self.content, dict):
            return _split_tensors(self.content, self.start, rows)
        smaller = list(_grouped(_ones(self.content), self.start, rows, sys.maxsize))
        return smaller if self.boxes is None else _with_boxes(smaller, self.boxes, self.start, self.first_box)


def parts(images: Any, max_rows: int, max_bytes: int, alone: bool = False, boxes: Any = None) -> list[Part]:
    """The requests for a call.

    Args:
        images: one image, several, or a mapping from the model's input names to arrays.
        max_rows: most images in a request.
        max_bytes: about the most bytes in a request; a single image may be larger.
        alone: whether encoded images, whose size is not known here, go one by one.
        boxes: of each image, or of the one image.

    Raises:
        TypeError, ValueError: something that is no image, or none at all.
        OSError: a file that is not there.
    """
    if isinstance(images, Mapping):
        if boxes is not None:
            raise ValueError(_NO_BOXES)
        tensors = {str(name): _floats(_array(value)) for name, value in images.items()}
        if len({len(tensor) for tensor in tensors.values()}) != 1 or not len(next(iter(tensors.values()))):
            raise ValueError("tensors by name have the same first dimension, at least 1")
        row = max(1, sum(tensor[:1].nbytes for tensor in tensors.values()))
        return _split_tensors(tensors, 0, max(1, min(max_rows, max_bytes // row)))
    single = _item(images, boxes is not None)
    items = [single] if single is not None else [_known(one, boxes is not None) for one in _iterated(images)]
    made = list(_grouped(_ones(items), 0, max_rows, max_bytes, alone))
    if not made:
        raise ValueError("there is no image; give at least one")
    if boxes is None:
        return made
    if not all(isinstance(item, Encoded) for item in items):
        raise ValueError(_NO_BOXES)
    listed = _lists([boxes] if single is not None else boxes)
    if len(listed) != len(items):
        raise ValueError(f"there are {len(items)} images and boxes of {len(listed)}: give a list for each image")
    return _with_boxes(made, listed, 0, 0)


_NO_BOXES = "boxes go with image files, bytes or PIL images, not with arrays"


def _lists(boxes: Any) -> Boxes:
    """Boxes of each image as lists, of arrays and tensors too."""
    return [[[float(value) for value in box] for box in of_image] for of_image in boxes]


def _with_boxes(made: list[Part], boxes: Boxes, start: int, first_box: int) -> list[Part]:
    """``made`` with its share of ``boxes``, which begin with those of image ``start``."""
    divided = []
    for part in made:
        own = boxes[part.start - start : part.start - start + part.rows]
        divided.append(replace(part, boxes=own, first_box=first_box))
        first_box += sum(map(len, own))
    return divided


def _iterated(images: Any) -> Iterable[Any]:
    if not isinstance(images, Iterable):
        raise TypeError(f"an image is a path, bytes, a PIL image, or an array, not {type(images).__name__}")
    return images


def _known(one: Any, encoded: bool) -> Item:
    item = _item(one, encoded)
    if item is None:
        raise TypeError(f"an image is a path, bytes, a PIL image, or an array, not {type(one).__name__}")
    return item


def _item(one: Any, encoded: bool) -> Item | None:
    """``one`` as it is sent, if it is an image; a PIL image as a file where ``encoded`` asks for that."""
    if isinstance(one, str | os.PathLike):
        path = Path(one)
        return Encoded(path, path.stat().st_size)
    if isinstance(one, bytes | bytearray | memoryview):
        return Encoded(bytes(one), len(one))
    if isinstance(one, np.ndarray) or _is("torch", "Tensor", one):
        array = _array(one)
        if array.ndim < 3:
            raise ValueError(f"an image as an array has 3 dimensions and a batch has 4 or more, not {array.ndim}")
        array = _pixels(array) if array.dtype == np.uint8 else _floats(array)
        return array[None] if array.ndim == 3 else array
    if _is("PIL.Image", "Image", one):
        return _of_pil(one, encoded)
    return None


def _is(module: str, name: str, value: Any) -> bool:
    """Whether ``value`` is of a class of a library that may not be installed; if it is not loaded, nothing is."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _of_pil(image: Any, encoded: bool) -> Item:
    """Pixels, turned as EXIF says: a photograph gives the same features opened or as a file."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if encoded and image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    if encoded or image.mode in _PNG_MODES:
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        return Encoded(buffer.getvalue(), buffer.tell())
    return np.asarray(image.convert("RGB"))[None]


def _array(value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return value
    if _is("torch", "Tensor", value):
        torch = sys.modules["torch"]
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    return np.asarray(value)


def _pixels(array: Array) -> Array:
    """uint8 images with the channels last, which is how the server takes them; torch has them before the height."""
    return np.moveaxis(array, -3, -1) if array.shape[-1] != 3 and array.shape[-3] == 3 else array


def _floats(array: Array) -> Array:
    """Preprocessed values; float64 would only be narrowed by the server."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _ones(items: Iterable[Item]) -> Iterator[Item]:
    """One image at a time; the rows of an array are views."""
    for item in items:
        if isinstance(item, Encoded):
            yield item
        else:
            yield from (item[row : row + 1] for row in range(len(item)))


def _grouped(ones: Iterable[Item], start: int, max_rows: int, max_bytes: int, alone: bool = False) -> Iterator[Part]:
    """Runs of images that can go together: encoded ones, or arrays of one shape and dtype."""
    run: list[Any] = []
    size = 0
    kind: object = None
    for one in ones:
        its_kind = "encoded" if isinstance(one, Encoded) else (one.shape, one.dtype)
        full = len(run) == max_rows or size + one.nbytes > max_bytes or (alone and its_kind == "encoded")
        if run and (its_kind != kind or full):
            yield Part(start, len(run), run)
            start, run, size = start + len(run), [], 0
        run.append(one)
        size += one.nbytes
        kind = its_kind
    if run:
        yield Part(start, len(run), run)


def _split_tensors(tensors: dict[str, Array], start: int, rows: int) -> list[Part]:
    total = len(next(iter(tensors.values())))
    return [
        Part(start + first, min(rows, total - first), {k: v[first : first + rows] for k, v in tensors.items()})
        for first in range(0, total, rows)
    ]


def _npy(arrays: list[Array]) -> tuple[bytes, str]:
    buffer = io.BytesIO()
    np.save(buffer, np.concatenate(arrays), allow_pickle=False)
    return buffer.getvalue(), "application/x-npy"
