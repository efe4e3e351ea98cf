"""Run commands, and parse the tables that they print."""

from __future__ import annotations

import re
from typing import Any

from typer.testing import CliRunner

from service.cli import app


def fxserve(*arguments: object) -> Any:
    """Run a command in this process; the result has exit_code, stdout and stderr."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def fails(done: Any, code: int, said: str) -> None:
    """Assert that a command printed nothing but one line, an error that begins so."""
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert done.stderr.startswith(f"fxserve: {said}")
    assert done.stderr.count("\n") == 1


def rows(stdout: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose first column is called ``first``."""
    lines = stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == [first])
    body = []
    for line in lines[start + 2 :]:
        cells = re.split(r" {2,}", line)
        if set(lines[start + 1]) == set(line) or len(cells) < 2:
            break
        body.append(cells)
    return body
