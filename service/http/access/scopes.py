"""Scopes of API keys: what a key allows.

Where keys are configured, every route needs one, and every writing route one of scope admin, unless listed here.
"""

from __future__ import annotations

from fastapi import Request
from starlette.types import Scope

from service import page
from service.http.access.keys import Key
from service.problems import Forbidden, Problem

# Probes and load balancers send no key, and learn only whether the server is ready. The page and the reference are
# public files that prompt for a key; the requests that they send need it.
OPEN = frozenset(
    (
        *page.PATHS,
        "/healthz",
        "/readyz",
        "/v2/health/live",
        "/v2/health/ready",
        "/openapi.json",
    )
)

READ_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
# POST requests that change nothing: their bodies are images or queries.
_READ_POSTS = ("/features", "/infer", "/embeddings", "/v2/repository/index")

_KEY = "fxserve.key"


def set_key(scope: Scope, key: Key) -> None:
    """Record the key of a request."""
    scope[_KEY] = key


def reads(method: str, path: str) -> bool:
    """Whether a request changes nothing, so that a key of scope read allows it."""
    return method in READ_METHODS or (method == "POST" and path.endswith(_READ_POSTS))


def forbidden(key: Key, what: str) -> Problem:
    """Build the refusal of a request that ``key`` does not allow."""
    return Forbidden(
        f"{what} needs a key of scope admin, and {key.name} has the scope {key.scope}",
        {"WWW-Authenticate": 'Bearer realm="fxserve", error="insufficient_scope", scope="admin"'},
    )


def may_build(request: Request) -> bool:
    """Whether a request may build extractors and load weights, also implicitly."""
    key: Key | None = request.scope.get(_KEY)
    return key is None or key.scope == "admin"


async def require_admin(request: Request) -> None:
    """FastAPI dependency of GET routes that need scope admin.

    Raises:
        Problem: 403.
    """
    key: Key | None = request.scope.get(_KEY)
    if key is not None and key.scope != "admin":
        raise forbidden(key, f"{request.method} {request.url.path}"[:200])
