"""Responses to the client's requests: how their bodies are collected, and what they mean."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from service.client.exceptions import ConnectionFailed, Problem, problem_of

Buffer = NDArray[np.uint8]


@dataclass(frozen=True)
class Response:
    """A complete response; ``content`` is its body."""

    status: int
    headers: Mapping[str, str]
    content: Buffer


_MAX_RESERVED = 1024**3
"""Maximum bytes reserved before they arrive: the header of a broken proxy may announce any number."""


class Receiver:
    """Collects a response body into one buffer. Arrays decoded from it are views."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        announced = int(response.headers.get("content-length", 0))
        self._content: Buffer = np.empty(min(announced, _MAX_RESERVED), np.uint8)
        self._filled = 0

    def feed(self, chunk: bytes) -> None:
        """Append the next chunk of the body."""
        end = self._filled + len(chunk)
        if end > len(self._content):  # chunked, without Content-Length, or larger than what was reserved
            larger = np.empty(max(end, 2 * len(self._content)), np.uint8)
            larger[: self._filled] = self._content[: self._filled]
            self._content = larger
        self._content[self._filled : end] = np.frombuffer(chunk, np.uint8)
        self._filled = end

    def response(self) -> Response:
        """Return the complete response; call it after the last :meth:`feed`."""
        return Response(self._response.status_code, self._response.headers, self._content[: self._filled])


def json_object(response: Response, field: str) -> dict[str, Any]:
    """Decode a successful response, a JSON object with ``field``.

    Raises:
        ConnectionFailed: it is something else.
    """
    document = _decoded(response)
    if not isinstance(document, dict) or field not in document:
        raise unexpected(response, f"a JSON object with {field!r}")
    return document


def unexpected(response: Response, wanted: str) -> ConnectionFailed:
    """Build the error for a successful response that is not from fxserve but perhaps from a proxy."""
    return ConnectionFailed(
        f"the response is not {wanted}: is it fxserve that answers at this address? It begins with {_start(response)!r}"
    )


def problem_in(response: Response) -> Problem:
    """Build the error for a response with any other status."""
    document = _decoded(response)
    if not isinstance(document, dict):  # from a proxy, not from fxserve
        document = {"title": "Not a problem document", "detail": _start(response)}
    if response.status < 400 and (location := response.headers.get("location")):
        document["detail"] = f"the server redirects to {location}; give the client that server's address"
    return problem_of(response.status, document, response.headers.get("x-request-id"))


def retry_after(response: Response) -> float | None:
    """Return the seconds to wait before a retry, or None for no retry.

    The delay has jitter, so that clients do not all return at once.
    """
    value = response.headers.get("retry-after", "").strip()
    if response.status not in (429, 503) or not value:
        return None
    try:
        seconds = (
            float(value) if value.isdigit() else (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        )
    except (TypeError, ValueError):
        return None
    return max(0.0, seconds) * random.uniform(1.0, 1.25)


def _decoded(response: Response) -> Any:
    """Decode JSON; return None for anything else."""
    try:
        return json.loads(response.content.tobytes())
    except (ValueError, RecursionError):
        return None


def _start(response: Response) -> str:
    return response.content[:200].tobytes().decode("utf-8", "replace")
