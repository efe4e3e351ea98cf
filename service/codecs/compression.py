"""Compression and decompression of ``gzip`` and ``deflate`` bodies, with a limit on the unpacked size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from service.problems import BodyTooLarge, InvalidRequest, Problem

ENCODINGS = ("gzip", "deflate")

_STEP = 64 * 1024
_GZIP = 16 + zlib.MAX_WBITS

# Feature maps barely compress; higher levels cost far more time and save almost nothing.
_LEVEL = 1


def decompress(body: bytes | bytearray, encoding: str, limit: int) -> bytearray:
    """Unpack a body sent as ``encoding``. ``deflate`` may lack the zlib header, as some clients send it.

    Raises:
        Problem: 413 once it unpacks to more than ``limit`` bytes; 422 if it is damaged, cut short, or longer than one
            compressed stream.
    """
    unpacker = zlib.decompressobj(_window(body, encoding))
    unpacked = bytearray()
    view = memoryview(body)
    position = 0
    while not unpacker.eof:
        piece = unpacker.unconsumed_tail
        if not piece:
            piece = bytes(view[position : position + _STEP])
            position += len(piece)
        try:
            # Also call it without input: zlib may hold back output that did not fit into a step.
            step = unpacker.decompress(piece, _STEP)
        except zlib.error as error:
            raise _damaged(encoding, str(error)) from error
        if not (piece or step or unpacker.eof):
            raise _damaged(encoding, "it is cut short")
        unpacked += step
        if len(unpacked) > limit:
            raise BodyTooLarge(
                f"the body unpacks to more than {limit:,} bytes",
                limit=limit,
            )
    if unpacker.unused_data or position < len(body):
        raise _damaged(encoding, "bytes follow its end")
    return unpacked


def compress(parts: Sequence[bytes | memoryview], encoding: str) -> list[bytes | memoryview]:
    """Compress the parts of a body with ``encoding``, part by part."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP if encoding == "gzip" else zlib.MAX_WBITS)
    packed: list[bytes | memoryview] = []
    for part in parts:
        view = memoryview(part)
        packed += [packer.compress(view[start : start + _STEP]) for start in range(0, len(view), _STEP)]
    packed.append(packer.flush())
    return [piece for piece in packed if piece]


def asked_encoding(accept_encoding: str | None) -> str | None:
    """Return the encoding of the response; None for no compression.

    HTTP libraries list all encodings they know in every request, and a feature map takes longer to compress than to
    send. Responses are therefore compressed only if the client names a single encoding.

    >>> asked_encoding("gzip"), asked_encoding("gzip, deflate, br")
    ('gzip', None)
    """
    named = []
    for part in (accept_encoding or "").lower().split(","):
        name, _, quality = part.partition(";")
        if quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000") and name.strip() != "identity":
            named.append(name.strip())
    return named[0] if len(named) == 1 and named[0] in ENCODINGS else None


def _window(body: bytes | bytearray, encoding: str) -> int:
    if encoding == "gzip":
        return _GZIP
    has_header = len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


def _damaged(encoding: str, reason: str) -> Problem:
    return InvalidRequest(f"the body is not valid {encoding}: {reason}")
