"""API keys and their scopes.

A key is 32 random bytes, so the file holds plain SHA-256 digests: slow hashes such as scrypt protect secrets that can
be guessed, which 256 random bits cannot, and would slow down every request. The keys cannot be recovered from the file.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

log = logging.getLogger("fxserve")

Scope = Literal["read", "admin"]

# A prefix that secret scanners can look for in repositories and logs.
PREFIX = "fxs_"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 1024**2


class KeysInvalid(ValueError):
    """The file of keys cannot be read; the message names the line and never its content."""


@dataclass(frozen=True)
class Key:
    """One line of the file.

    Attributes:
        name: of its owner; letters, digits, ``.``, ``_`` and ``-``.
        scope: ``read``, or ``admin``, which may do all that ``read`` may.
        digest: SHA-256 of the secret.
    """

    name: str
    scope: Scope
    digest: bytes

    @property
    def line(self) -> str:
        """The key as the file has it."""
        return f"{self.name}:{self.scope}:{self.digest.hex()}"


def make(name: str, scope: Scope) -> tuple[Key, str]:
    """A new key and its secret, which is not stored.

    Raises:
        ValueError: ``name`` has other characters, or more than 64.
    """
    if not _NAME.fullmatch(name):
        raise ValueError("a key's name has 1 to 64 letters, digits, dots, hyphens and underscores")
    secret = PREFIX + secrets.token_urlsafe(32)
    return Key(name, scope, _digest(secret)), secret


class Keys:
    """The keys of a file, one ``name:scope:sha256`` a line; empty lines and ``#`` comments are skipped.

    Args:
        file: read now, and again by :meth:`reload`.

    Raises:
        KeysInvalid: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._keys = _read(file)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> Key | None:
        """The key with that secret. All are compared, each in constant time, against timing attacks."""
        digest = _digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def reload(self) -> None:
        """Read the file again. If it cannot be read, the keys stay as they are, and the log says why."""
        try:
            self._keys = _read(self._file)
        except KeysInvalid as error:
            log.error("the API keys stay as they were: %s", error)
        else:
            log.warning("%d API keys were read again", len(self._keys))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _read(file: Path) -> list[Key]:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise KeysInvalid(f"{file} has over {_MAX_FILE_BYTES:,} bytes")
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
                raise KeysInvalid(f"{file}, line {number}: there is a key of that name above")
    if not keys:
        raise KeysInvalid(f"{file} holds no key; fxserve key NAME makes a line for it")
    return keys


def _parse(text: str, where: str) -> Key:
    name, _, rest = text.partition(":")
    scope, _, digest = rest.partition(":")
    if not _NAME.fullmatch(name) or scope not in get_args(Scope) or not _DIGEST.fullmatch(digest):
        # The line may hold the secret itself: it is not shown.
        raise KeysInvalid(f"{where}: not NAME:read:SHA256 or NAME:admin:SHA256; fxserve key NAME makes such a line")
    return Key(name, "admin" if scope == "admin" else "read", bytes.fromhex(digest))
