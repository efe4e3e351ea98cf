"""Authentication and authorization, with safe defaults."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from service.engine import Engine
from service.http.access.hosts import Hosts, is_own_origin
from service.http.access.keys import Key, Keys
from service.http.problem_responses import error_response
from service.http.routing.declared import READ_METHODS, DeclaredRoutes, route_path
from service.http.scope import CALLER, Caller, header, headers_of, joined_header
from service.problems import Draining, Forbidden, Misdirected, Problem, Unauthorized


class Access:
    """Middleware that checks each request's ``Host``, ``Origin`` and API key, and identifies its client for admission.

    While the engine drains, only requests that read are let through.

    Args:
        app: the next middleware.
        engine: computes the requests.
        routes: who may send which requests.
        keys: the API keys; None if none are needed.
        hosts: the host names allowed if there are no keys.
        origins: origins of web pages that may send write requests; the same as for CORS.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        routes: DeclaredRoutes,
        keys: Keys | None,
        hosts: Hosts,
        origins: Collection[str] = (),
    ) -> None:
        self.app = app
        self.engine = engine
        self.routes = routes
        self.keys = keys
        self.hosts = hosts
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = header(scope, b"host")
        caller = Caller(address(scope))
        try:
            if self.keys is None and host is not None and not self.hosts.allow(host):  # optional in HTTP/1.0
                detail = f"{host[:200]!r} is not a host name of this server; FXSERVE_HOSTS lists the allowed ones"
                raise Misdirected(detail)
            if scope["method"] not in READ_METHODS:
                self._check_origin(scope, host)
            if self.keys is not None and (needed := self.routes.find(scope).access) != "open":
                key = _key(scope, self.keys)
                caller = Caller(f"key {key.name}", key.scope == "admin", key.name)
                if needed == "admin" and key.scope != "admin":
                    what = f"{scope['method']} {scope['path']}"[:200]
                    raise Forbidden(
                        f"{what} needs a key with scope admin, and {key.name} has scope {key.scope}",
                        {"WWW-Authenticate": 'Bearer realm="fxserve", error="insufficient_scope", scope="admin"'},
                    )
            if self.engine.draining and scope["method"] not in READ_METHODS:
                raise Draining()
        except Problem as refusal:
            scope[CALLER] = caller
            await error_response(route_path(scope), refusal)(scope, receive, send)
            return
        scope[CALLER] = caller
        await self.app(scope, receive, send)

    def _check_origin(self, scope: Scope, host: str | None) -> None:
        """Refuse cross-site request forgery: browsers send simple POST requests from any page without a preflight.

        ``Origin`` decides; browsers send ``Sec-Fetch-Site`` only over TLS and to loopback addresses.
        """
        if "*" in self.origins:
            return
        origin = joined_header(scope, b"origin")
        if origin is None:
            allowed = headers_of(scope).get(b"sec-fetch-site", [b""])[-1] not in (b"cross-site", b"same-site")
        else:
            allowed = origin in self.origins or (host is not None and is_own_origin(origin, host))
        if not allowed:
            raise Forbidden(
                "pages of other origins may not send this request; FXSERVE_CORS_ORIGINS lists the allowed ones"
            )


def _key(scope: Scope, keys: Keys) -> Key:
    """Return the key of a request.

    Raises:
        Unauthorized: it has no key, or an unknown one.
    """
    authorization = headers_of(scope).get(b"authorization", [b""])[-1]
    scheme, _, secret = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        raise Unauthorized(
            "this needs an API key: send the header Authorization: Bearer KEY",
            {"WWW-Authenticate": 'Bearer realm="fxserve"'},
        )
    key = keys.find(secret.strip().decode("latin-1"))
    if key is None:
        raise Unauthorized(
            "the API key is unknown; send one of this server's keys, which its operator makes with fxserve key",
            {"WWW-Authenticate": 'Bearer realm="fxserve", error="invalid_token"'},
        )
    return key


def address(scope: Scope) -> str:
    """Return the IP address of a request's client; for IPv6 its /64 network, which one client controls."""
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
