"""Request bodies: by their content type to encoded images or to tensors."""

from __future__ import annotations

import binascii
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence

import orjson
from fastapi import Request
from pydantic import ValidationError
from torch import Tensor

from service.codecs import multipart, npy, safetensors
from service.codecs.negotiation import media_type
from service.schemas.problems import Refusal, invalid_body
from service.schemas.v1 import MAX_IMAGES, ImagesBody

TAKEN = ("image/*", "multipart/form-data", "application/json", npy.MEDIA_TYPE, safetensors.MEDIA_TYPE)

Inputs = Sequence[bytes] | Mapping[str, Tensor]
RunInPool = Callable[..., Awaitable[Inputs]]

SMALL = 32 * 1024
"""Below this, parsing takes less time than going to another thread and back."""

_REMEMBERED = 256
"""Headers of requests, which most clients send alike."""


@functools.lru_cache(_REMEMBERED)
def check(
    content_type: str | None, content_encoding: str | None, taken: tuple[str, ...] = TAKEN
) -> tuple[str, Mapping[str, str]]:
    """A body's media type and its parameters by its headers, before a byte of it is read.

    Raises:
        Refusal: 415 that lists what is ``taken``.
    """
    encoding = (content_encoding or "").strip().lower()
    kind, parameters = media_type(content_type)
    known = kind in taken or ("image/*" in taken and kind.startswith("image/") and len(kind) > len("image/"))
    if known and encoding in ("", "identity"):
        return kind, parameters
    what = f"Content-Encoding {encoding[:40]!r}" if known else f"a body of type {kind[:100] or '(none given)'!r}"
    raise Refusal(
        "unsupported-media-type",
        f"{what} is not taken; send one of {', '.join(taken)}, unencoded",
        available=list(taken),
    )


async def read(
    request: Request, kind: str, parameters: Mapping[str, str], first_input: str, run_in_pool: RunInPool
) -> Inputs:
    """The encoded images of a body in the order sent, or its tensors by input name.

    Args:
        request: whose body is read.
        kind, parameters: what :func:`check` gave.
        first_input: the name that the one array of an npy body gets.
        run_in_pool: runs a function in a thread, for what takes long.

    Raises:
        Refusal: 422 where the body is not what its type says.
        ClientDisconnect: the client left before it had sent everything.
    """
    if kind == "multipart/form-data":
        return await multipart.read(request.stream(), parameters)
    chunks = [chunk async for chunk in request.stream()]
    parse = _PARSERS.get(kind, _image)
    if parse is _image or sum(map(len, chunks)) < SMALL:
        return parse(chunks, first_input)
    return await run_in_pool(parse, chunks, first_input)


def _image(chunks: list[bytes], first_input: str) -> list[bytes]:
    return [b"".join(chunks)]


def _npy(chunks: list[bytes], first_input: str) -> dict[str, Tensor]:
    return {first_input: npy.read(bytearray().join(chunks))}


def _safetensors(chunks: list[bytes], first_input: str) -> dict[str, Tensor]:
    return safetensors.read(bytearray().join(chunks))


def _json(chunks: list[bytes], first_input: str) -> list[bytes]:
    # Base64 has no commas: there is one between two images, and none in what becomes millions of objects in a parser.
    if sum(chunk.count(b",") for chunk in chunks) > MAX_IMAGES:
        raise Refusal("invalid-request", f"the body has more than {MAX_IMAGES} images; send fewer at a time")
    try:
        document = orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise Refusal("invalid-request", f"the body is not JSON: {error}") from error
    try:
        body = ImagesBody.model_validate(document)
    except ValidationError as error:
        raise invalid_body(error) from error
    images = []
    for index, text in enumerate(body.images):
        try:
            images.append(binascii.a2b_base64(text, strict_mode=True))
        except ValueError as error:  # binascii.Error, and characters outside ASCII
            reason = f"image {index} is not base64 (RFC 4648, with padding and without line breaks): {error}"
            raise Refusal("bad-image", reason, index=index) from error
    return images


_PARSERS: dict[str, Callable[[list[bytes], str], Inputs]] = {
    "application/json": _json,
    npy.MEDIA_TYPE: _npy,
    safetensors.MEDIA_TYPE: _safetensors,
}
