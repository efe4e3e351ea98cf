"""Error messages of failed commands."""

from __future__ import annotations

import errno
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from service.problems import Problem


class Commands(TyperGroup):
    """Command group that reports user errors in one line on stderr.

    The exit code is 2 for wrong usage and 1 otherwise.
    """

    def main(self, *args: Any, **kwargs: Any) -> None:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except (typer.Abort, KeyboardInterrupt):  # the latter before typer has parsed the command
            sys.exit(130)
        except Exception as error:
            message_and_code = _message_of(error)
            if message_and_code is None:
                raise  # a bug: show its traceback
            message, code = message_and_code
            # pydantic, which validates options and variables, prefixes our messages.
            print(f"fxserve: {' '.join(message.split()).replace('Value error, ', '')}", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


def _message_of(error: Exception) -> tuple[str, int] | None:
    """Return message and exit code for a user error; None for other errors."""
    # A module that has not been imported cannot have raised its errors.
    fx_errors, pydantic = sys.modules.get("fxcore.errors"), sys.modules.get("pydantic")
    if isinstance(error, Problem) or (fx_errors is not None and isinstance(error, fx_errors.FxError)):
        return error.detail.replace("weights=random", "--weights random"), 1  # a query's parameter is an option here
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'][:1]))}: {first['msg']} (it is {first['input']!r})", 2
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # of a write, which names no file
        return str(error.strerror), 1
    if hasattr(error, "format_message"):  # typer's usage errors; it does not export their base class
        context = getattr(error, "ctx", None)
        return error.format_message() + (f" (see {context.command_path} --help)" if context else ""), 2
    return None
