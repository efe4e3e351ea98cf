"""Parsing of the files of a ``multipart/form-data`` body while it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from service.codecs.negotiation import media_type
from service.problems import InvalidRequest
from service.schemas.v1.features import MAX_IMAGES

MAX_PART_HEADER_BYTES = 8192


class _Files:
    """The parser's callbacks, which collect the files."""

    def __init__(self) -> None:
        self.files: list[bytes] = []
        self.ended = False
        self._chunks: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._field = bytearray()
        self._value = bytearray()

    def on_part_begin(self) -> None:
        if len(self.files) >= MAX_IMAGES:
            raise InvalidRequest(f"the body has more than {MAX_IMAGES} parts; send fewer images at a time")
        self._chunks, self._headers, self._header_bytes = [], {}, 0

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += self._counted(data[start:end])

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._counted(data[start:end])

    def on_header_end(self) -> None:
        self._headers[self._field.decode("latin-1").strip().lower()] = self._value.decode("utf-8", "replace").strip()
        self._field, self._value = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        disposition, parameters = media_type(self._headers.get("content-disposition"))
        is_file = "filename" in parameters or "filename*" in parameters
        if not is_file and not self._headers.get("content-type", "").lower().startswith("image/"):
            name = parameters.get("name", "?")
            raise InvalidRequest(
                f"part {len(self.files)} ({name[:100]!r}, {disposition[:40] or 'no disposition'}) is not a file; send "
                "images as file fields and options in the query",
                field=name[:100],
            )

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._chunks.append(data[start:end])

    def on_part_end(self) -> None:
        self.files.append(self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks))
        self._chunks = []

    def on_end(self) -> None:
        self.ended = True

    def _counted(self, piece: bytes) -> bytes:
        self._header_bytes += len(piece)
        if self._header_bytes > MAX_PART_HEADER_BYTES:
            raise InvalidRequest(f"the headers of part {len(self.files)} are too long")
        return piece


async def read(chunks: AsyncIterator[bytes], boundary: str) -> list[bytes]:
    """Return the contents of all file fields, in the order sent.

    Args:
        chunks: the body as it arrives.
        boundary: that of the Content-Type.

    Raises:
        Problem: 422 ``invalid-request``: no boundary, a malformed or unfinished body, a field that is not a file, too
            many parts, or no parts.
    """
    if not 0 < len(boundary) <= 70:
        raise InvalidRequest("multipart/form-data needs a boundary of 1 to 70 characters in its Content-Type")
    found = _Files()
    parser = MultipartParser(
        boundary.encode("latin-1", "replace"),
        {
            "on_part_begin": found.on_part_begin,
            "on_part_data": found.on_part_data,
            "on_part_end": found.on_part_end,
            "on_header_field": found.on_header_field,
            "on_header_value": found.on_header_value,
            "on_header_end": found.on_header_end,
            "on_headers_finished": found.on_headers_finished,
            "on_end": found.on_end,
        },
    )
    try:
        async for chunk in chunks:
            parser.write(chunk)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the multipart body is malformed: {error}") from error
    if not found.ended:  # newer versions of the parser raise this themselves
        raise InvalidRequest("the multipart body ends before its last boundary")
    if not found.files:
        raise InvalidRequest("the multipart body has no file; send at least one image")
    return found.files
