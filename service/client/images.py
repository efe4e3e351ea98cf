"""Split the images of a call into request bodies.

Encoded images (paths, bytes) are sent unchanged, pixels and preprocessed tensors as arrays. A body is built only when
it is sent, so that a call with a thousand paths does not read them all at once.
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
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from service.client.tensors import MEDIA_TYPE

Array = NDArray[Any]

# PIL modes that PNG stores without conversion; the server converts them to RGB as it does for files.
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGBA")


_MAX_GREY = 2**16 - 1


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
    """The content of one request.

    Attributes:
        start: index in the call of its first image.
        rows: number of images.
        content: encoded images, arrays, or tensors by input name.
        boxes: the boxes of each image, with ``pool=roi``.
        first_box: index in the call of its first box.
    """

    start: int
    rows: int
    content: list[Encoded] | list[Array] | dict[str, Array]
    boxes: Boxes | None = None
    first_box: int = 0

    @property
    def first_row(self) -> int:
        """Index of its first row in the outputs of the call."""
        return self.start if self.boxes is None else self.first_box

    @property
    def row_end(self) -> int:
        """Index after its last row in the outputs of the call."""
        return self.first_row + (self.rows if self.boxes is None else sum(map(len, self.boxes)))

    def body(self) -> tuple[bytes, str]:
        """Read and encode the request body; returns it with its content type."""
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
        """Split into parts of at most ``rows`` images."""
        if isinstance(self.content, dict):
            return _split_tensors(self.content, self.start, rows)
        smaller = list(_group(_single_images(self.content), self.start, rows, sys.maxsize))
        return smaller if self.boxes is None else _with_boxes(smaller, self.boxes, self.start, self.first_box)


def split_call(images: Any, max_rows: int, max_bytes: int, one_by_one: bool = False, boxes: Any = None) -> list[Part]:
    """Split the images of a call into requests.

    Args:
        images: one image, several, or a mapping from the model's input names to arrays.
        max_rows: maximum images per request.
        max_bytes: approximate maximum bytes per request; a single image may be larger.
        one_by_one: send each encoded image, whose size in pixels is not known here, in a request of its own.
        boxes: of each image, or of the single image.

    Raises:
        TypeError, ValueError: an argument is not an image, or there are no images.
        OSError: a file does not exist.
    """
    if isinstance(images, Mapping):
        if boxes is not None:
            raise ValueError(_NO_BOXES)
        tensors = {str(name): _floats(_array(value)) for name, value in images.items()}
        if len({len(tensor) for tensor in tensors.values()}) != 1 or not len(next(iter(tensors.values()))):
            raise ValueError("tensors by name must have the same first dimension, at least 1")
        row = max(1, sum(tensor[:1].nbytes for tensor in tensors.values()))
        return _split_tensors(tensors, 0, max(1, min(max_rows, max_bytes // row)))
    single = _item(images, boxes is not None)
    items = [single] if single is not None else [_require_item(one, boxes is not None) for one in _iterated(images)]
    box_lists = None if boxes is None else _box_lists([boxes] if single is not None else boxes)
    if box_lists is not None and not all(isinstance(item, Encoded) for item in items):
        raise ValueError(_NO_BOXES)
    if box_lists is not None and len(box_lists) != len(items):
        raise ValueError(
            f"there are {len(items)} images and {len(box_lists)} lists of boxes: give one list for each image"
        )
    box_counts = repeat(0) if box_lists is None else map(len, box_lists)
    requests = list(_group(_single_images(items), 0, max_rows, max_bytes, one_by_one, box_counts))
    if not requests:
        raise ValueError("there are no images; give at least one")
    return requests if box_lists is None else _with_boxes(requests, box_lists, 0, 0)


_MAX_BOXES = 16_384
"""Maximum boxes that the server takes in a request."""

_NO_BOXES = "boxes need image files, bytes or PIL images, not arrays"


def _box_lists(boxes: Any) -> Boxes:
    """Convert the boxes of each image, which may be arrays or tensors, to lists.

    Raises:
        ValueError: they are nested otherwise, or hold something else than numbers.
    """
    try:
        return [[[float(value) for value in box] for box in of_image] for of_image in boxes]
    except (TypeError, ValueError) as error:
        raise ValueError("boxes are, for each image, a list of boxes [x1, y1, x2, y2]") from error


def _with_boxes(parts: list[Part], boxes: Boxes, start: int, first_box: int) -> list[Part]:
    """Give each part its boxes.

    Args:
        parts: parts without boxes.
        boxes: the boxes of each image, beginning with image number ``start``.
        start: index in the call of the first image of ``boxes``.
        first_box: index in the call of the first of ``boxes``.
    """
    with_boxes = []
    for part in parts:
        own = boxes[part.start - start : part.start - start + part.rows]
        with_boxes.append(replace(part, boxes=own, first_box=first_box))
        first_box += sum(map(len, own))
    return with_boxes


def _iterated(images: Any) -> Iterable[Any]:
    if not isinstance(images, Iterable):
        raise TypeError(f"an image is a path, bytes, a PIL image, or an array, not {type(images).__name__}")
    return images


def _require_item(one: Any, encoded: bool) -> Item:
    item = _item(one, encoded)
    if item is None:
        raise TypeError(f"an image is a path, bytes, a PIL image, or an array, not {type(one).__name__}")
    return item


def _item(one: Any, encoded: bool) -> Item | None:
    """Convert one image to what is sent, PIL images to files if ``encoded``; None if it is not an image."""
    if isinstance(one, str | os.PathLike):
        path = Path(one)
        return Encoded(path, path.stat().st_size)
    if isinstance(one, bytes | bytearray | memoryview):
        return Encoded(bytes(one), len(one))
    if isinstance(one, np.ndarray) or _is_instance("torch", "Tensor", one):
        array = _array(one)
        if array.ndim < 3:
            raise ValueError(f"an image as an array has 3 dimensions and a batch has 4 or more, not {array.ndim}")
        array = _pixels(array) if array.dtype == np.uint8 else _floats(array)
        return array[None] if array.ndim == 3 else array
    if _is_instance("PIL.Image", "Image", one):
        return _from_pil(one, encoded)
    return None


def _is_instance(module: str, name: str, value: Any) -> bool:
    """``isinstance`` for a class of an optional library, without importing it."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _from_pil(image: Any, encoded: bool) -> Item:
    """Encode a PIL image losslessly, with its EXIF orientation applied as the server does for files.

    Integers (modes I, I;16 and its byte orders) are grey levels of 16 bits, and clipped to them.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = Image.fromarray(np.asarray(image).clip(0, _MAX_GREY).astype(np.uint16))
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
    if _is_instance("torch", "Tensor", value):
        torch = sys.modules["torch"]
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    return np.asarray(value)


def _pixels(array: Array) -> Array:
    """Move the channels of uint8 images last, as the server expects; torch has them before the height."""
    return np.moveaxis(array, -3, -1) if array.shape[-1] != 3 and array.shape[-3] == 3 else array


def _floats(array: Array) -> Array:
    """Narrow float64 to float32, which the server computes in."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _single_images(items: Iterable[Item]) -> Iterator[Item]:
    """Yield one image at a time; rows of an array are views."""
    for item in items:
        if isinstance(item, Encoded):
            yield item
        else:
            yield from (item[row : row + 1] for row in range(len(item)))


def _group(
    ones: Iterable[Item],
    start: int,
    max_rows: int,
    max_bytes: int,
    one_by_one: bool = False,
    box_counts: Iterable[int] = repeat(0),
) -> Iterator[Part]:
    """Group consecutive images that one request can hold: encoded ones, or arrays of one shape and dtype.

    ``box_counts`` are the images' numbers of boxes.
    """
    run: list[Any] = []
    size = boxes = 0
    kind: object = None
    for one, count in zip(ones, box_counts, strict=False):
        its_kind = "encoded" if isinstance(one, Encoded) else (one.shape, one.dtype)
        full = len(run) == max_rows or size + one.nbytes > max_bytes or (one_by_one and its_kind == "encoded")
        full |= boxes + count > _MAX_BOXES
        if run and (its_kind != kind or full):
            yield Part(start, len(run), run)
            start, run, size, boxes = start + len(run), [], 0, 0
        run.append(one)
        size += one.nbytes
        boxes += count
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
