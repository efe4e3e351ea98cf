"""Checks of the ``Host`` header, as protection against DNS rebinding.

A web page can point its own domain at this server's address. The browser then treats the server as the page's origin
and lets the page read and change everything. But it still sends the page's domain as ``Host``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

_MAX_LENGTH = 253
"""Maximum characters of a name in DNS."""

# Nobody can register a name under these.
_PRIVATE = (".localhost", ".local", ".internal", ".svc", ".cluster.local")


class Hosts:
    """The allowed host names: configured ones, and those that cannot be registered in DNS.

    The latter are IP addresses, names of one label, names under ``.localhost``, ``.local``, ``.internal``, ``.svc`` and
    ``.cluster.local``, and the machine's own name.

    Args:
        patterns: configured names, or shell patterns of names.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = tuple(pattern.removesuffix(".").lower() for pattern in patterns)
        self._machine = socket.gethostname().lower()
        self._known = lru_cache(256)(self._is_known)

    def allow(self, host: str) -> bool:
        """Return whether requests with this ``Host`` are allowed. The port is ignored."""
        name = name_of(host)
        return len(name) <= _MAX_LENGTH and self._known(name)

    def _is_known(self, name: str) -> bool:
        if "." not in name or name.endswith(_PRIVATE) or name == self._machine or _is_address(name):
            return True
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)


def name_of(host: str) -> str:
    """Normalize a ``Host``: ``Example.org.:8000`` → ``example.org``, ``[::1]:80`` → ``::1``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".").lower()


def is_own_origin(origin: str, host: str) -> bool:
    """Return whether ``origin``, such as ``https://example.org``, is the server's own by the request's ``host``.

    The scheme is ignored, since a proxy may terminate TLS.
    """
    scheme, _, authority = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    if port is None or not authority:
        return False
    return authority.removesuffix(port) == host.lower().removesuffix(port)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
