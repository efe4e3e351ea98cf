"""Conversion of disk, bucket and archive errors to messages that name what failed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from fxcore.errors import FxError, summarize


def reason_of(error: Exception) -> str:
    """Return the message of an operating system or library error, or its type if it has none."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextmanager
def driver_errors(url: str) -> Iterator[None]:
    """Convert errors of a file system's driver to errors that name ``url``.

    Raises:
        FxError: the driver failed.
    """
    try:
        yield
    except FxError:
        raise
    except OSError as error:
        raise FxError(f"{url}: {reason_of(error)}") from error
    except Exception as error:  # errors of botocore and others have no common base class
        raise FxError(f"{url}: {summarize(error)}") from error


@contextmanager
def write_errors(folder: object) -> Iterator[None]:
    """Convert write errors to errors that name ``folder``.

    Raises:
        FxError: it cannot be written.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise FxError(f"{folder} cannot be written: {reason_of(error)}") from error
