"""What this service keeps in the scope of a request: its caller, its reservation, and its headers by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import Scope

REFUSED = "fxserve.refused"
"""Key in the scope of a request answered 429: its ``Retry-After`` in seconds."""

CALLER = "fxserve.caller"
"""Key in the scope of a request: its :class:`Caller`."""

RESERVATION = "fxserve.reservation"
"""Key in the scope of a request with a body: its :class:`~service.engine.requests.admission.admission.Reservation`,
which its route extends."""

_HEADERS = "fxserve.headers"


@dataclass(frozen=True)
class Caller:
    """The client of a request. Memory and admission are shared fairly between clients.

    Attributes:
        client: its API key, or its address on a server without keys.
        may_build: whether it may build extractors and load weights, explicitly or implicitly.
        key: name of its API key; None on a server or route without keys.
    """

    client: str = ""
    may_build: bool = True
    key: str | None = None


_UNKNOWN = Caller()


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request."""
    caller = scope.get(CALLER, _UNKNOWN)
    assert isinstance(caller, Caller)
    return caller


async def _get_caller(request: Request) -> Caller:
    return caller_of(request.scope)


Calling = Annotated[Caller, Depends(_get_caller)]


def headers_of(scope: Scope) -> dict[bytes, list[bytes]]:
    """Map the names of request headers, in lower case, to their values in the order sent; made once per request."""
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
