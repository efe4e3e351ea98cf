"""Splitting the images of a call into request bodies.

Encoded images (paths, bytes) are sent unchanged; pixels and preprocessed tensors are sent as arrays. A body is built
only when it is sent, so that a call with a thousand paths does not read them all at once.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from service.client.regions import Regions, bytes_of, lists
from service.client.tensors import MEDIA_TYPE, is_instance, to_array

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


@dataclass(frozen=True)
class Part:
    """The content of one request.

    Attributes:
        start: index of its first image in the call.
        rows: number of images.
        content: encoded images, arrays, or tensors by input name.
        regions: regions to pool of all images of the call; None for whole maps.
        edits: edits of inner values in JSON form; their images are indices in the call.
    """

    start: int
    rows: int
    content: list[Encoded] | list[Array] | dict[str, Array]
    regions: Regions | None = None
    edits: Sequence[Mapping[str, Any]] = ()

    @property
    def first_row(self) -> int:
        """Index of its first row in the outputs of the call."""
        return self.start if self.regions is None else self.regions.first[self.start]

    @property
    def row_end(self) -> int:
        """Index after its last row in the outputs of the call."""
        end = self.start + self.rows
        return end if self.regions is None else self.regions.first[end]

    def body(self) -> tuple[bytes, str]:
        """Read and encode the request body. Return it with its content type."""
        if self.regions is not None or self.edits:
            images = [base64.b64encode(item.read()).decode() for item in self.content if isinstance(item, Encoded)]
            end = self.start + self.rows
            regions = {} if self.regions is None else {self.regions.field: self.regions.of_images[self.start : end]}
            edits = {"edits": [self._own(edit) for edit in self.edits]} if self.edits else {}
            return json.dumps({"images": images, **regions, **edits}).encode(), "application/json"
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
        images = _single_images(self.content)
        return list(_group(images, self.start, rows, sys.maxsize, regions=self.regions, edits=self.edits))

    def _own(self, edit: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an edit of the call with indices of images in this part."""
        if "images" not in edit:
            return edit
        return {**edit, "images": [i - self.start for i in edit["images"] if 0 <= i - self.start < self.rows]}


def split_call(
    images: Any,
    max_rows: int,
    max_bytes: int,
    one_by_one: bool = False,
    boxes: Any = None,
    points: Any = None,
    masks: Any = None,
    edits: Iterable[Mapping[str, Any]] = (),
) -> list[Part]:
    """Split the images of a call into requests.

    Args:
        images: one image, several, or a mapping from the model's input names to arrays.
        max_rows: maximum images per request.
        max_bytes: approximate maximum bytes per request; a single image may be larger.
        one_by_one: send each encoded image in a separate request, because its size in pixels is not known here.
        boxes, points, masks: one of these, for each image or for the single image.
        edits: edits of inner values; only with encoded images.

    Raises:
        TypeError, ValueError: an argument is not an image, or there are no images.
        OSError: a file does not exist.
    """
    given = {"boxes": boxes, "points": points, "masks": masks}
    given = {field: one for field, one in given.items() if one is not None}
    if len(given) > 1:
        raise ValueError("give one of boxes, points and masks")
    field, given_lists = next(iter(given.items()), ("", None))
    edits = [edits] if isinstance(edits, Mapping) else edits or ()
    edits = [_edit(edit) for edit in edits]
    encoded = bool(given or edits)
    if isinstance(images, Mapping):
        if encoded:
            raise ValueError(f"{field or 'edits'} {_NOT_ARRAYS}")
        tensors = {str(name): _floats(to_array(value)) for name, value in images.items()}
        for name, tensor in tensors.items():
            if not tensor.ndim or tensor.dtype.kind in "OSU":
                raise TypeError(
                    f"tensor {name!r} must be an array with one row per image, not {tensor.tolist()!r:.100}"
                )
        if len({len(tensor) for tensor in tensors.values()}) != 1 or not len(next(iter(tensors.values()))):
            raise ValueError("tensors by name must have the same first dimension, at least 1")
        row = max(1, sum(tensor[:1].nbytes for tensor in tensors.values()))
        return _split_tensors(tensors, 0, max(1, min(max_rows, max_bytes // row)))
    single = _item(images, encoded)
    items = [single] if single is not None else _items(images, encoded)
    if encoded and not all(isinstance(item, Encoded) for item in items):
        raise ValueError(f"{field or 'edits'} {_NOT_ARRAYS}")
    regions = None
    if given:
        regions = Regions(field, lists(field, [given_lists] if single is not None else given_lists))
        if len(regions.of_images) != len(items):
            raise ValueError(
                f"there are {len(items)} images and {len(regions.of_images)} lists of {field}: give one list for each "
                "image"
            )
    requests = list(_group(_single_images(items), 0, max_rows, max_bytes, one_by_one, regions, edits))
    if not requests:
        raise ValueError("there are no images; give at least one")
    for edit in edits:
        if wrong := [index for index in edit.get("images", ()) if not 0 <= index < len(items)]:
            raise ValueError(f"an edit selects image {wrong[0]}, but the {len(items)} images are numbered from 0")
    return requests


_MAX_REGIONS = 16_384
"""Maximum regions that the server accepts in a request."""

_NOT_ARRAYS = "need image files, bytes or PIL images, not arrays"


def _edit(edit: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an edit to JSON form.

    Raises:
        TypeError: it is not an edit.
        ValueError: a number is not finite; JSON lacks such numbers.
    """
    if not isinstance(edit, Mapping):
        raise TypeError(
            f'an edit must be a mapping such as {{"node": "layer2", "scale": 0}}, not {type(edit).__name__}'
        )
    arrays = {name: to_array(value) for name, value in edit.items() if name != "node" and value is not None}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"an edit's {name} must be finite, not {array.tolist()}")
    if "images" in arrays and arrays["images"].ndim != 1:
        raise TypeError(f"an edit's images must be a list of indices, such as [0], not {edit['images']!r}")
    return {"node": edit.get("node"), **{name: array.tolist() for name, array in arrays.items()}}


def _items(images: Any, encoded: bool) -> list[Item]:
    items = []
    for one in images if isinstance(images, Iterable) else [images]:
        item = _item(one, encoded)
        if item is None:
            raise TypeError(f"an image must be a path, bytes, a PIL image, or an array, not {type(one).__name__}")
        items.append(item)
    return items


def _item(one: Any, encoded: bool) -> Item | None:
    """Convert one image to the form in which it is sent; None if it is not an image.

    With ``encoded``, PIL images become files.
    """
    if isinstance(one, str | os.PathLike):
        path = Path(one)
        return Encoded(path, path.stat().st_size)
    if isinstance(one, bytes | bytearray | memoryview):
        return Encoded(bytes(one), len(one))
    if isinstance(one, np.ndarray) or is_instance("torch", "Tensor", one):
        array = to_array(one)
        if array.ndim < 3:
            raise ValueError(
                f"an array must have 3 dimensions for one image, or 4 or more for a batch, not {array.ndim}"
            )
        array = _pixels(array) if array.dtype == np.uint8 else _floats(array)
        return array[None] if array.ndim == 3 else array
    if is_instance("PIL.Image", "Image", one):
        return _from_pil(one, encoded)
    return None


def _from_pil(image: Any, encoded: bool) -> Item:
    """Encode a PIL image losslessly, with its orientation applied as by Pillow, which also reads it from XMP.

    Integers (mode I, and I;16 in any byte order) are treated as 16-bit grey levels and clipped.
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


def _pixels(array: Array) -> Array:
    """Move the channels of uint8 images last, as the server expects; in torch they come before the height."""
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
    regions: Regions | None = None,
    edits: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Part]:
    """Group consecutive images that one request can hold: encoded ones, or arrays of one shape and dtype.

    ``start`` is the index of the first one in the call, which ``regions`` and ``edits`` are of.
    """
    run: list[Any] = []
    size = count = 0
    kind: object = None
    for index, one in enumerate(ones, start):
        of_image = [] if regions is None else regions.of_images[index]
        bytes_of_one = one.nbytes + bytes_of(of_image)
        its_kind = "encoded" if isinstance(one, Encoded) else (one.shape, one.dtype)
        full = len(run) == max_rows or size + bytes_of_one > max_bytes or (one_by_one and its_kind == "encoded")
        full |= count + len(of_image) > _MAX_REGIONS
        if run and (its_kind != kind or full):
            yield Part(start, len(run), run, regions, edits)
            start, run, size, count = start + len(run), [], 0, 0
        run.append(one)
        size += bytes_of_one
        count += len(of_image)
        kind = its_kind
    if run:
        yield Part(start, len(run), run, regions, edits)


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
