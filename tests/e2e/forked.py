"""Processes forked from one that has imported the service: to import it for each takes seconds of every core."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_PRELOADED = [
    "service.cli",
    "service.app",
    "service.http.server.run",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*_PRELOADED, __name__])


@atexit.register
def _end() -> None:
    """End what a test has not, which multiprocessing would wait for."""
    for process in multiprocessing.active_children():
        process.kill()


class Forked:
    """A command in a process of its own, which is handled as a :class:`subprocess.Popen` is.

    Args:
        command: ``fxserve``, ``uvicorn`` or a script of Python, and its arguments.
        environment: all of its variables.
        log: the file that it writes stdout and stderr to.
        errors: the file for stderr, if that is another one.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], log: Path, errors: Path | None = None
    ) -> None:
        self._process = _context.Process(target=_run, args=(command, dict(environment), log, errors))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: there is none after ``timeout`` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(command: list[str], environment: dict[str, str], log: Path, errors: Path | None) -> None:
    with open(os.devnull) as nothing, log.open("wb") as file, (errors or Path(os.devnull)).open("wb") as other:
        for number, opened in enumerate((nothing, file, other if errors else file)):
            os.dup2(opened.fileno(), number)
    sys.stdin = os.fdopen(0, closefd=False)  # what uvicorn hands on to its processes
    os.environ.clear()
    os.environ.update(environment)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)  # a new interpreter would look there, a fork does not
    sys.path[:0] = [path for path in added if path not in sys.path]
    tempfile.tempdir = None  # as the environment has it
    multiprocessing.set_start_method(None, force=True)  # as in a new interpreter; OpenVINO starts a process
    sys.argv = command
    if command[0].endswith(".py"):
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")
        return
    if command[0] == "uvicorn":
        from uvicorn.main import main
    else:
        from service.cli import main
    main()
