"""Processes forked from one that has imported the service, since importing it for each takes seconds of CPU time."""

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
    """Kill processes that a test left running, since multiprocessing would wait for them."""
    for process in multiprocessing.active_children():
        process.kill()


class Forked:
    """A command in a separate process, with the interface of :class:`subprocess.Popen`.

    Args:
        command: ``fxserve``, ``uvicorn`` or a Python script, and its arguments.
        environment: all environment variables of the process.
        log: the file that stdout and stderr are written to.
        errors: the file for stderr, if different.
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
        """Wait for the process to end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the process is still running after ``timeout`` seconds.
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
    sys.stdin = os.fdopen(0, closefd=False)  # uvicorn passes it to its worker processes
    os.environ.clear()
    os.environ.update(environment)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)  # a new interpreter reads this, a fork does not
    sys.path[:0] = [path for path in added if path not in sys.path]
    tempfile.tempdir = None  # determine it again from the environment
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
