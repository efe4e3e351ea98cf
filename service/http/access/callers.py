"""The client of a request and its permissions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import Scope

_CALLER = "fxserve.caller"


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


def set_caller(scope: Scope, caller: Caller) -> None:
    """Store the caller of a request in its scope."""
    scope[_CALLER] = caller


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request."""
    caller = scope.get(_CALLER, _UNKNOWN)
    assert isinstance(caller, Caller)
    return caller


async def _get_caller(request: Request) -> Caller:
    return caller_of(request.scope)


Calling = Annotated[Caller, Depends(_get_caller)]
