"""The names that a server answers to: a guard against DNS rebinding.

A web page can point its own domain name at this server's address. The browser then treats the server as the page's own
origin and lets the page read and change everything. The ``Host`` that it sends is still the page's name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

_LONGEST = 253
"""Characters of a name, as DNS has it."""

# Nobody can register a name under these.
_PRIVATE = (".localhost", ".local", ".internal", ".svc", ".cluster.local")


class Hosts:
    """Accepts names that are the server's, or that nobody else can register.

    Those are IP addresses, names of one label, names under ``.localhost``, ``.local``, ``.internal``, ``.svc`` and
    ``.cluster.local``, and the machine's own.

    Args:
        patterns: further names, or shell patterns of names.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = tuple(pattern.lower() for pattern in patterns)
        self._machine = socket.gethostname().lower()
        self._known = lru_cache(256)(self._is_known)

    def allow(self, host: str) -> bool:
        """Whether requests with this ``Host`` may be answered; its port does not matter."""
        name = name_of(host)
        return len(name) <= _LONGEST and self._known(name)

    def _is_known(self, name: str) -> bool:
        if "." not in name or name.endswith(_PRIVATE) or name == self._machine or _is_address(name):
            return True
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)


def name_of(host: str) -> str:
    """``Example.org.:8000`` → ``example.org``, ``[::1]:80`` → ``::1``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".").lower()


def is_own_origin(origin: str, host: str) -> bool:
    """Whether a page of ``origin``, such as ``https://example.org``, comes from the server that was asked as ``host``.

    The scheme does not count: a proxy may have taken TLS off.
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
