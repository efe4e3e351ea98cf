"""API keys and their scopes.

The file of keys holds SHA-256 digests. Keys are 256 random bits, which cannot be guessed, so slow hashes such as scrypt
would only slow down every request.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from service.choices import KeyScope

log = logging.getLogger("fxserve")


# A prefix that secret scanners can look for in repositories and logs.
PREFIX = "fxs_"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 1024**2


class KeysInvalid(ValueError):
    """The file of keys is invalid. The message gives the line, never its content."""


@dataclass(frozen=True)
class Key:
    """An API key.

    Attributes:
        name: name of its owner: letters, digits, ``.``, ``_`` and ``-``.
        scope: ``read``, or ``admin``, which includes ``read``.
        digest: SHA-256 of the secret.
    """

    name: str
    scope: KeyScope
    digest: bytes

    @property
    def line(self) -> str:
        """The key's line in the file."""
        return f"{self.name}:{self.scope}:{self.digest.hex()}"


def make(name: str, scope: KeyScope) -> tuple[Key, str]:
    """Create a key. Return it with its secret, which is not stored.

    Raises:
        ValueError: ``name`` is empty, too long, or has characters that are not allowed.
    """
    if not _NAME.fullmatch(name):
        raise ValueError("a key's name must have 1 to 64 letters, digits, dots, hyphens and underscores")
    secret = PREFIX + secrets.token_urlsafe(32)
    return Key(name, scope, _digest(secret)), secret


class Keys:
    """The keys of a file: one ``name:scope:sha256`` per line, with empty lines and ``#`` comments.

    Args:
        file: the file.

    Raises:
        KeysInvalid: the file cannot be read or is invalid.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._keys = _read(file)

    def find(self, secret: str) -> Key | None:
        """Find the key of a secret. All keys are compared, each in constant time, to prevent timing attacks."""
        digest = _digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def reload(self) -> None:
        """Read the file again. If it is invalid, keep the current keys and log why."""
        try:
            self._keys = _read(self._file)
        except KeysInvalid as error:
            log.error("the API keys were not reloaded: %s", error)
        else:
            log.warning("reloaded %d API keys", len(self._keys))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _read(file: Path) -> list[Key]:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe may wait for ever
            raise KeysInvalid(f"{file} must be a regular file: it is read again on SIGHUP")
        if status.st_size > _MAX_FILE_BYTES:
            raise KeysInvalid(f"{file} is larger than {_MAX_FILE_BYTES:,} bytes")
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise KeysInvalid(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeysInvalid(f"{file} is not UTF-8") from error
    keys: list[Key] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            keys.append(_parse(text, f"{file}, line {number}"))
            if any(keys[-1].name == key.name for key in keys[:-1]):
                raise KeysInvalid(
                    f"{file}, line {number}: an earlier line has the same name; give each key a name of its own, such "
                    "as alice and alice-2 while both are in use"
                )
    if not keys:
        raise KeysInvalid(f"{file} has no keys; fxserve key NAME creates one")
    return keys


def _parse(text: str, where: str) -> Key:
    name, _, rest = text.partition(":")
    scope, _, digest = rest.partition(":")
    if not _NAME.fullmatch(name) or scope not in get_args(KeyScope) or not _DIGEST.fullmatch(digest):
        # The line is not shown, because it may be the secret itself.
        raise KeysInvalid(f"{where}: not NAME:read:SHA256 or NAME:admin:SHA256; fxserve key NAME creates such a line")
    return Key(name, "admin" if scope == "admin" else "read", bytes.fromhex(digest))
