"""Checks of request heads that RFC 9110 and 9112 require and the parser lacks."""

from __future__ import annotations

import re

from service.problems import HeadTooLarge, HTTPVersion, NotHTTP

MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of the request line and all header lines, without white space around values."""

Headers = list[tuple[bytes, bytes]]

_HOST = re.compile(rb"(\[[\w.:%~-]+\]|[\w.~%!$&'()*+,;=-]*)(:\d*)?", re.ASCII)
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)([/?][^#]*)?(#.*)?", re.ASCII | re.IGNORECASE)


def too_large() -> HeadTooLarge:
    """Build the problem with status 431."""
    return HeadTooLarge(f"the request line and the headers have more than {MAX_HEAD_BYTES:,} bytes")


def check(version: str, method: bytes, target: bytes, headers: Headers) -> bytes:
    """Check a request's head and return its target as path and query.

    The host of an absolute target replaces the one in ``headers`` (RFC 9112, 3.2.2).

    Args:
        version: HTTP version, such as "1.1".
        method: the method, in upper case.
        target: the target, as sent.
        headers: the headers, with names in lower case; may be modified.

    Raises:
        Problem: 400, 431 or 505.
    """
    # The request line with spaces, "HTTP/1.1" and CRLF; header lines with ": " and CRLF; the empty line.
    size = len(method) + len(target) + 12 + sum(len(name) + len(value) + 4 for name, value in headers) + 2
    if size > MAX_HEAD_BYTES:
        raise too_large()
    if version not in ("1.0", "1.1"):
        raise HTTPVersion(f"this server speaks HTTP/1.1 and 1.0, not {version[:10]}")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 and (hosts or version == "1.1"):
        raise NotHTTP(f"a request must have exactly one Host header, and this one has {len(hosts)}")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise NotHTTP("the Host header is not a host with an optional port")
    if method == b"CONNECT":
        raise NotHTTP("CONNECT is for proxies, and this server is not a proxy")
    if target.startswith(b"/"):
        return target
    if target == b"*":
        return b"/"
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or _HOST.fullmatch(absolute[1]) is None:
        raise NotHTTP("the request's target is neither a path nor an http URL")
    headers[:] = [(b"host", absolute[1]), *(header for header in headers if header[0] != b"host")]
    path = absolute[2] or b"/"
    return path if path.startswith(b"/") else b"/" + path


def without_upgrade(version: str, method: bytes, target: bytes, headers: Headers) -> bytes:
    """Serialize a head without its offer to upgrade the protocol."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() != b"upgrade")
        lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])
