"""What the user is told when a command fails."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Tells what the user got wrong in one line on stderr: exit code 2 for the command's form, 1 for the rest."""

    def main(self, *args: Any, **kwargs: Any) -> None:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except typer.Abort:
            sys.exit(130)
        except Exception as error:
            told = _message_of(error)
            if told is None:
                raise  # a defect of ours: its traceback is what is wanted
            message, code = told
            # pydantic, which reads options and variables, puts its word for the error before ours.
            print(f"fxserve: {' '.join(message.split()).replace('Value error, ', '')}", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


def _message_of(error: Exception) -> tuple[str, int] | None:
    """What to say of an error and the exit code; None where it is not the user's."""
    # Where a module has not been imported, none of its errors can have been raised.
    fx_errors, pydantic = sys.modules.get("fxcore.errors"), sys.modules.get("pydantic")
    if fx_errors is not None and isinstance(error, fx_errors.FxError):
        return error.detail, 1
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'][:1]))}: {first['msg']} (it is {first['input']!r})", 2
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", 1
    if hasattr(error, "format_message"):  # typer's errors of usage, whose base class it does not export
        context = getattr(error, "ctx", None)
        return error.format_message() + (f" (see {context.command_path} --help)" if context else ""), 2
    return None
