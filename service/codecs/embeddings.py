"""Embeddings: OpenAI's body → encoded images, and vectors → OpenAI's response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from pydantic import ValidationError
from torch import Tensor

from service.codecs.requests import image_text
from service.codecs.tensors import json
from service.problems import InvalidRequest
from service.schemas.embeddings import EmbeddingsRequest
from service.schemas.problems import invalid_body
from service.schemas.v1.features import MAX_IMAGES

_MAX_COMMAS = 2 * MAX_IMAGES + 64
"""Maximum commas in a body, which a parser would make millions of objects of: one in each data URL and one between two,
and some for the other fields."""


@dataclass(frozen=True)
class Asked:
    """A request, with its images decoded from base64.

    Attributes:
        model: as it was sent.
        images: encoded as files.
        encoding: ``float`` or ``base64``.
        dimensions: how many of the first values to give; None is all.
    """

    model: str
    images: Sequence[bytes]
    encoding: str
    dimensions: int | None


def read(chunks: Sequence[bytes]) -> Asked:
    """Return a body in OpenAI's shape.

    Raises:
        Problem: it is no such body, or an image in it is neither base64 nor a data URL.
    """
    if sum(chunk.count(b",") for chunk in chunks) > _MAX_COMMAS:
        raise InvalidRequest(f"the body has more than {MAX_IMAGES} images; send fewer at a time")
    try:
        body = EmbeddingsRequest.model_validate(orjson.loads(b"".join(chunks)))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except ValidationError as error:
        raise invalid_body(error) from error
    return Asked(body.model, image_text.decode(body.input), body.encoding_format, body.dimensions)


def write(vectors: Tensor, model: str, encoding: str) -> list[bytes | memoryview]:
    """Return the parts of a response.

    Args:
        vectors: float32 ``[n, values]`` on the CPU. As ``float``, NaN and infinities, which JSON does not have, become
            null.
        model: as the request named it.
        encoding: ``float`` for numbers, ``base64`` for the little-endian bytes.
    """
    parts: list[bytes | memoryview] = [b'{"object":"list","data":[']
    for index, vector in enumerate(vectors):
        parts.append(b'%b{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"", index))
        if encoding == "base64":
            parts += [b'"', *json.base64(vector), b'"}']
        else:
            parts += [b"[", *json.numbers(vector), b"]}"]
    usage = b'],"model":%b,"usage":{"prompt_tokens":0,"total_tokens":0}}'
    parts.append(usage % orjson.dumps(model))
    return parts
