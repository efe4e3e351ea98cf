"""Parsing of Content-Type, and choice among offered media types by Accept.

python-mimeparse is not used: it splits quoted parameters at their commas, and raises for a partly invalid header.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.problems import NotAcceptable

LONGEST = 2048
"""Maximum characters of a header that are parsed: browsers send about 150. A much longer one is meant to block the
event loop."""


def essence(content_type: str | None) -> str:
    """Return the media type of a Content-Type in lower case, without its parameters."""
    return (content_type or "").partition(";")[0].strip().lower()


def media_type(content_type: str | None) -> tuple[str, dict[str, str]]:
    """Return the media type of a Content-Type in lower case, and its parameters.

    >>> media_type('Image/JPEG; Name="a;b.jpg"')
    ('image/jpeg', {'name': 'a;b.jpg'})
    """
    essence, *rest = _split_outside_quotes(content_type or "", ";")
    parameters = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if equals:
            value = value.strip()
            if len(value) >= 2 and value[0] == value[-1] == '"':
                value = value[1:-1]
            parameters[key.strip().lower()] = value
    return essence.strip().lower(), parameters


def choose(accept: str | None, offered: Sequence[str]) -> str:
    """Return the offered type that ``accept`` prefers (RFC 9110, 12.5.1); of equally preferred ones, the first offered.

    Raises:
        Problem: 406, which lists the offered types.

    >>> choose("image/png;q=0.5, application/*", ["application/json", "image/png"])
    'application/json'
    """
    if accept is None or not accept.strip():
        return offered[0]
    ranges = [_range(part) for part in _split_outside_quotes(accept[:LONGEST], ",") if part.strip()]
    best, best_quality = None, 0.0
    for candidate in offered:
        quality = _quality(candidate, ranges)
        if quality > best_quality:
            best, best_quality = candidate, quality
    if best is None:
        raise NotAcceptable(
            f"cannot respond with {accept[:200]!r}; Accept one of {', '.join(offered)}",
            available=list(offered),
        )
    return best


def _quality(candidate: str, ranges: Sequence[tuple[str, float]]) -> float:
    """Return the quality of the most specific range that covers ``candidate``; 0 if none does."""
    family = candidate.partition("/")[0]
    for wanted in (candidate, f"{family}/*", "*/*"):
        qualities = [quality for name, quality in ranges if name == wanted]
        if qualities:
            return max(qualities)
    return 0.0


def _range(part: str) -> tuple[str, float]:
    name, parameters = media_type(part)
    try:
        quality = float(parameters.get("q", "1"))
    except ValueError:
        quality = 0.0
    return ("*/*" if name == "*" else name), (quality if 0.0 <= quality <= 1.0 else 0.0)


def _split_outside_quotes(text: str, separator: str) -> list[str]:
    if '"' not in text:
        return text.split(separator)
    parts, start, quoted = [], 0, False
    for position, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif character == separator and not quoted:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return parts
