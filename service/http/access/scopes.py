"""What the key of a request allows."""

from __future__ import annotations

from fastapi import Request
from starlette.types import Scope

from service.http.access.keys import Key
from service.problems import Forbidden, Problem

_KEY = "fxserve.key"


def set_key(scope: Scope, key: Key) -> None:
    """Record the key of a request."""
    scope[_KEY] = key


def forbidden(key: Key, what: str) -> Problem:
    """Build the refusal of a request that ``key`` does not allow."""
    return Forbidden(
        f"{what} needs a key of scope admin, and {key.name} has the scope {key.scope}",
        {"WWW-Authenticate": 'Bearer realm="fxserve", error="insufficient_scope", scope="admin"'},
    )


def may_build(request: Request) -> bool:
    """Return whether a request may build extractors and load weights, also implicitly."""
    key: Key | None = request.scope.get(_KEY)
    return key is None or key.scope == "admin"
