"""Images in JSON: base64 strings or data URLs (RFC 2397) → encoded bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pybase64

from service.problems import BadImage

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,30}):")
_MAX_HEAD = 256
"""Maximum characters of a data URL before its data."""

_HINT = 'send the image itself, as "data:image/jpeg;base64,…" or bare base64'


def decode(texts: Sequence[str]) -> list[bytes]:
    """Decode the images of a JSON body.

    Raises:
        Problem: 422, for the first string that is neither base64 nor a data URL with base64.
    """
    images = []
    for index, text in enumerate(texts):
        try:
            images.append(decode_one(text))
        except ValueError as error:
            raise BadImage(f"image {index} {error}: {_HINT}", index=index) from error
    return images


def decode_one(text: str) -> bytes:
    """Decode a file from base64, or from a data URL with base64.

    Raises:
        ValueError: it is neither; the message says what it is.
    """
    scheme = _SCHEME.match(text)
    if scheme is not None:
        if scheme[1].lower() != "data":
            raise ValueError(f"is a URL with the scheme {scheme[1]!r}, and this server fetches no URLs")
        comma = text.find(",", 0, _MAX_HEAD)
        if comma < 0 or not text[:comma].rstrip().lower().endswith(";base64"):
            raise ValueError("is a data URL without base64")
        text = text[comma + 1 :]
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        rule = "RFC 4648, with padding and without line breaks"
        raise ValueError(f"is neither a data URL nor base64 ({rule})") from error
