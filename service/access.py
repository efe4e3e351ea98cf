"""Who is asking, and whether they may.

Everything needs a key, and changes need one of scope admin, unless it is listed here as needing less: a route that is
forgotten is closed, not open.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.engine.admission import CLIENT
from service.keys import Key, Keys
from service.problems import Refusal, error_response

# Probes and load balancers carry no keys, and learn only whether to send requests here. The page and the reference are
# the same for every server of this version, and ask for a key; what they show with it needs one.
OPEN = frozenset(
    (
        "/",
        "/healthz",
        "/readyz",
        "/v2/health/live",
        "/v2/health/ready",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
    )
)

_READ_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
# POSTs that change nothing: they carry images, or a question.
_READ_POSTS = ("/features", "/infer", "/v2/repository/index")

_KEY = "fxserve.key"


class Access:
    """Tells admission who each request's client is, and refuses what the client's key does not allow.

    Args:
        app: what comes next.
        keys: None where anybody may do anything.
        origins: the web pages that may change things here: those that CORS allows.
    """

    def __init__(self, app: ASGIApp, keys: Keys | None, origins: Collection[str] = ()) -> None:
        self.app = app
        self.keys = keys
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        authorization = fetched_from = origin = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"sec-fetch-site":
                fetched_from = value
            elif name == b"origin":
                origin = value
        client = address(scope)
        try:
            if fetched_from in (b"cross-site", b"same-site") and scope["method"] not in _READ_METHODS:
                self._check_origin(origin)
            if self.keys is not None and scope["path"] not in OPEN:
                key = scope[_KEY] = self._key(scope, authorization)
                client = f"key {key.name}"
        except Refusal as refusal:
            await error_response(scope["path"], refusal)(scope, receive, send)
            return
        CLIENT.set(client)
        await self.app(scope, receive, send)

    def _key(self, scope: Scope, authorization: bytes | None) -> Key:
        assert self.keys is not None
        scheme, _, secret = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise Refusal(
                "unauthorized",
                "this needs an API key: send the header Authorization: Bearer KEY",
                {"WWW-Authenticate": 'Bearer realm="fxserve"'},
            )
        key = self.keys.find(secret.strip().decode("latin-1"))
        if key is None:
            raise Refusal(
                "unauthorized",
                "the API key is not known here",
                {"WWW-Authenticate": 'Bearer realm="fxserve", error="invalid_token"'},
            )
        if key.scope != "admin" and not _reads(scope["method"], scope["path"]):
            raise forbidden(key, f"{scope['method']} {scope['path']}"[:200])
        return key

    def _check_origin(self, origin: bytes | None) -> None:
        """Refuse cross-site request forgery: browsers send simple POSTs from any page without a preflight."""
        if "*" not in self.origins and (origin or b"").decode("latin-1") not in self.origins:
            raise Refusal("forbidden", "web pages of other origins may not do this; FXSERVE_CORS_ORIGINS lists who may")


def forbidden(key: Key, what: str) -> Refusal:
    """The refusal of what ``key`` may not do."""
    return Refusal(
        "forbidden",
        f"{what} needs a key of scope admin, and {key.name} has the scope {key.scope}",
        {"WWW-Authenticate": 'Bearer realm="fxserve", error="insufficient_scope", scope="admin"'},
    )


def may_build(request: Request) -> bool:
    """Whether a request may have extractors made and weights loaded, be it only as a step towards its answer."""
    key: Key | None = request.scope.get(_KEY)
    return key is None or key.scope == "admin"


async def require_admin(request: Request) -> None:
    """A dependency of routes that need a key of scope admin though their method only reads.

    Raises:
        Refusal: 403.
    """
    key: Key | None = request.scope.get(_KEY)
    if key is not None and key.scope != "admin":
        raise forbidden(key, f"{request.method} {request.url.path}"[:200])


def address(scope: Scope) -> str:
    """The IP address that a request comes from; of IPv6 its /64 network, all of which one client may use."""
    client = scope.get("client")
    return "" if client is None else _network(client[0])


@lru_cache(1024)
def _network(host: str) -> str:
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return host
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def _reads(method: str, path: str) -> bool:
    return method in _READ_METHODS or (method == "POST" and path.endswith(_READ_POSTS))
