"""Request headers, indexed by name once per request."""

from __future__ import annotations

from starlette.types import Scope

_HEADERS = "fxserve.headers"


def headers_of(scope: Scope) -> dict[bytes, list[bytes]]:
    """Map the names of request headers, in lower case, to their values in the order sent."""
    known: dict[bytes, list[bytes]] | None = scope.get(_HEADERS)
    if known is None:
        known = scope[_HEADERS] = {}
        for name, value in scope["headers"]:
            known.setdefault(name, []).append(value)
    return known


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a request header; ``name`` in lower case."""
    values = headers_of(scope).get(name)
    return values[0].decode("latin-1") if values else None


def joined_header(scope: Scope, name: bytes) -> str | None:
    """Return all values of a list header, joined by commas (RFC 9110, 5.3); ``name`` in lower case."""
    values = headers_of(scope).get(name)
    return b", ".join(values).decode("latin-1") if values else None
