"""Processes forked from one that has imported the service, since importing it for each takes seconds of CPU time."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fxcore.backends import process as child_process

_CHILDREN = ["fxcore.backends.lowering_child", "fxcore.exports.export_child"]
_PRELOADED = [
    *_CHILDREN,
    "service.cli",
    "service.app",
    "service.http.server.run",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*_PRELOADED, __name__])

# Starting a process polls all others, and two threads must not read the exit code of one.
_guard = threading.Lock()


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
        self,
        command: list[str],
        environment: Mapping[str, str],
        log: Path,
        errors: Path | None = None,
        _started: Connection | None = None,
    ) -> None:
        self._process = _context.Process(target=_run, args=(command, dict(environment), log, errors, _started))
        with _guard:
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with _guard:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the process is still running after ``timeout`` seconds.
        """
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def script(code: str, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Forked:
    """Run Python code in a fork, which writes to the files ``stdout`` and ``stderr`` in ``folder``.

    Args:
        environment: all environment variables of the process, if different from this one's.
    """
    file = folder / "script.py"
    file.write_text(code)
    command = [str(file), *arguments]
    return Forked(command, environment or os.environ, folder / "stdout", folder / "stderr")


class ForkedChild(Forked):
    """A child process of :mod:`fxcore.backends.process`.

    Attributes:
        stdin: closing it ends the process.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.stdin, child = _context.Pipe()
        with child:
            super().__init__(command, environment, log, _started=child)
        self.stdin.recv_bytes()  # it leads its process group now


def popen(command: list[str], *, env: Mapping[str, str], stdout: Any, **rest: Any) -> Any:
    """Start a process as :class:`subprocess.Popen` does; fork it if it is one of the library's child processes."""
    if command[1] == "-m" and command[2] in _CHILDREN and not _runs_inductor(Path(command[3])):
        return ForkedChild(command[2:], env, Path(stdout.name))
    return subprocess.Popen(command, env=env, stdout=stdout, **rest)


def _runs_inductor(folder: Path) -> bool:
    """Return whether a child runs inductor, which starts children of its own and fails in forked processes."""
    saved = torch.load(folder / child_process._FILE, weights_only=False, mmap=True)
    return bool(saved.get("settings", {}).get("backend") == "inductor")


def _run(
    command: list[str], environment: dict[str, str], log: Path, errors: Path | None, started: Connection | None
) -> None:
    with open(os.devnull) as nothing, log.open("wb") as file, (errors or Path(os.devnull)).open("wb") as other:
        for number, opened in enumerate((started or nothing, file, other if errors else file)):
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
    if started is not None:
        os.setsid()
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch is loaded and reads the variable no more
        started.send_bytes(b"")
        child_process.main(import_module(command[0]).work)
        return
    if command[0] == "uvicorn":
        from uvicorn.main import main
    else:
        from service.cli import main
    main()
