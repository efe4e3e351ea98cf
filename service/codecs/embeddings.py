"""Embeddings in OpenAI's shape: request body → encoded images, and vectors → response."""

from __future__ import annotations

from collections.abc import Sequence

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
"""Maximum commas in a body, so that parsing cannot create millions of objects. Each image has one as a data URL and one
as a separator; the rest are for the other fields."""

_HEAD_BYTES = 2 * 1024
"""Maximum bytes of the head of a vector in a response, with the objects that it is written from."""


def read(chunks: Sequence[bytes]) -> tuple[EmbeddingsRequest, list[bytes]]:
    """Parse a body in OpenAI's shape. Return it without its images, and these decoded from base64.

    Raises:
        Problem: the body is invalid, or an image in it is neither base64 nor a data URL.
    """
    if sum(chunk.count(b",") for chunk in chunks) > _MAX_COMMAS:
        raise InvalidRequest(f"the body has more than {MAX_IMAGES} images; send fewer at a time")
    try:
        body = EmbeddingsRequest.model_validate(orjson.loads(b"".join(chunks)))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except ValidationError as error:
        raise invalid_body(error) from error
    images = image_text.decode(body.input)
    body.input.clear()
    return body, images


def write(vectors: Tensor, model: str, encoding: str | None) -> list[bytes | memoryview]:
    """Return the parts of a response.

    Args:
        vectors: float32 ``[n, values]`` on the CPU. As ``float``, NaN and infinities become null, because JSON lacks
            them.
        model: the model as named in the request.
        encoding: ``base64`` for the little-endian bytes; otherwise numbers.
    """
    parts: list[bytes | memoryview] = [b'{"object":"list","data":[']
    for index, vector in enumerate(vectors):
        parts.append(b'%b{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"", index))
        parts += [*json.values(vector, encoding), b"}"]
    usage = b'],"model":%b,"usage":{"prompt_tokens":0,"total_tokens":0}}'
    parts.append(usage % orjson.dumps(model))
    return parts


def max_bytes(vectors: Tensor) -> int:
    """Return the maximum bytes that :func:`write` allocates for ``vectors``."""
    return _HEAD_BYTES * len(vectors) + json.max_bytes(vectors)
