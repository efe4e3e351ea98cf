"""Request bodies → encoded images or tensors, according to the content type."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError
from torch import Tensor

from fxcore.edits import Edit
from service.codecs.negotiation import LONGEST, media_type
from service.codecs.requests import image_text, regions
from service.codecs.tensors import npy, safetensors
from service.problems import InvalidRequest, UnsupportedMediaType
from service.schemas.problems import invalid_body
from service.schemas.regions import GivenRegions
from service.schemas.v1.features import MAX_IMAGES, MAX_REGIONS, MAX_RUNS, ImagesBody

TAKEN = ("image/*", "multipart/form-data", "application/json", npy.MEDIA_TYPE, safetensors.MEDIA_TYPE)

Inputs = Sequence[bytes] | Mapping[str, Tensor]


@dataclass(frozen=True)
class Sent:
    """The content of a body.

    Attributes:
        inputs: encoded images in the order sent, or tensors by input name.
        regions: regions of the images; None if the body has none.
        edits: edits of inner values, in order.
    """

    inputs: Inputs
    regions: GivenRegions | None = None
    edits: Sequence[Edit] = ()


_NOT_FINITE = re.compile(rb"NaN|Infinity|[0-9][eE]\+?[0-9]{3}")

_SMALL = 256 * 1024
"""Bytes below which a body takes less time to parse than switching threads twice."""

_SMALL_IMAGE = 1024**2
"""The same for an encoded image, whose bytes are only joined."""

_REMEMBERED = 256
"""Maximum cached parsed headers; most clients always send the same ones."""


@functools.lru_cache(_REMEMBERED)
def check(content_type: str | None, content_encoding: str | None, taken: tuple[str, ...] = TAKEN) -> tuple[str, str]:
    """Return a body's media type and its boundary, which may be empty, from its headers alone.

    Raises:
        Problem: 415, which lists the accepted types, ``taken``.
    """
    if len(content_type or "") + len(content_encoding or "") > LONGEST:
        what = f"a Content-Type and Content-Encoding of more than {LONGEST:,} characters"
    else:
        encoding = (content_encoding or "").strip().lower()
        kind, parameters = media_type(content_type)
        known = kind in taken or ("image/*" in taken and kind.startswith("image/") and len(kind) > len("image/"))
        if known and encoding in ("", "identity"):
            return kind, parameters.get("boundary", "")
        what = f"Content-Encoding {encoding[:40]!r}" if known else f"a body of type {kind[:100] or '(none given)'!r}"
    raise UnsupportedMediaType(
        f"{what} is not supported; send one of {', '.join(taken)}, unencoded",
        available=list(taken),
    )


def is_small(kind: str, chunks: list[bytes]) -> bool:
    """Return whether parsing takes less time than switching threads twice; see :func:`parse`."""
    limit = _SMALL_IMAGE if kind.startswith("image/") else _SMALL
    return kind == "multipart/form-data" or sum(map(len, chunks)) < limit


def parse(chunks: list[bytes], kind: str, first_input: str) -> Sent:
    """Parse the encoded images or tensors of a body.

    Args:
        chunks: its bytes as they arrived; for ``multipart/form-data``, its files.
        kind: its media type, from :func:`check`.
        first_input: the name for the array of an npy body.

    Raises:
        Problem: 422: the body does not match its type.
    """
    if kind == "multipart/form-data":
        return Sent(chunks)
    if kind == "application/json":
        return _json(chunks)
    if kind == npy.MEDIA_TYPE:
        return Sent({first_input: npy.read(bytearray().join(chunks))})
    if kind == safetensors.MEDIA_TYPE:
        return Sent(safetensors.read(bytearray().join(chunks)))
    return Sent([b"".join(chunks)])


def _json(chunks: list[bytes]) -> Sent:
    # Checked before parsing, which could create millions of objects. An image has one comma as a separator and one as a
    # data URL, its list of regions one, and each box four.
    if sum(chunk.count(b",") for chunk in chunks) > 3 * MAX_IMAGES + 4 * MAX_REGIONS + MAX_RUNS:
        detail = (
            f"the body has more than {MAX_IMAGES} images, {MAX_REGIONS} regions or {MAX_RUNS} run lengths; send fewer "
            "at a time, or run lengths as strings"
        )
        raise InvalidRequest(detail)
    try:
        body = ImagesBody.model_validate(_document(b"".join(chunks)))
    except ValidationError as error:
        raise invalid_body(error) from error
    edits = [Edit(**dict(edit)) for edit in body.edits]
    return Sent(image_text.decode(body.images), regions.read(body), edits)


def _document(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # Python's parser also reads NaN and infinities, which are refused with the place of their box, point or edit.
        if _NOT_FINITE.search(text):
            with suppress(ValueError, RecursionError):
                return json.loads(text.decode(), parse_int=orjson.loads)
        raise InvalidRequest(f"the body is not JSON: {error}") from error
