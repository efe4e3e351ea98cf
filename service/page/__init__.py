"""The web page and the API reference: static files.

They load nothing from other hosts: Swagger UI comes from the package ``fastapi-offline``, the photographs from
:mod:`fxcore.photos`.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import fxcore.photos

_STRICT = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; connect-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".jpg": "image/jpeg",
}


@dataclass(frozen=True)
class File:
    """A static file.

    Attributes:
        content: its bytes.
        compressed: its gzip-compressed bytes; None if they would not be smaller.
        media_type: its ``Content-Type``.
        etag: changes with the content. It is weak, because both forms share it.
    """

    content: bytes
    compressed: bytes | None
    media_type: str
    etag: str


def _found() -> dict[str, Path]:
    here, swagger = Path(__file__).parent, Path(str(files("fastapi_offline"))) / "static"
    shell = [file for file in here.iterdir() if file.suffix in _MEDIA_TYPES]
    found = {f"/page/{file.name}": file for file in (*shell, *fxcore.photos.files())}
    found |= {f"/page/{name}": swagger / name for name in ("swagger-ui-bundle.js", "swagger-ui.css")}
    reference = found.pop("/page/docs.html")
    return {**found, "/": found.pop("/page/index.html"), "/docs": reference, "/redoc": reference}


PATHS = _found()
"""The location of each file, by URL path."""

# A worker uses the policy of its own script, so every file has one.
POLICIES = dict.fromkeys(PATHS, _STRICT)
"""The Content-Security-Policy of each path: only scripts, styles and requests of this service are allowed."""


@functools.cache
def read(path: str) -> File:
    """Return the file at one of :data:`PATHS`."""
    content = PATHS[path].read_bytes()
    compressed = None if path.endswith(".jpg") else gzip.compress(content, mtime=0)
    etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    return File(content, compressed, _MEDIA_TYPES[PATHS[path].suffix], etag)
