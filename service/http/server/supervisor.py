"""A supervisor that replaces server processes as soon as they exit, and can fork them.

It subclasses private classes of uvicorn. If they have changed, importing this module raises ImportError, and
:func:`service.http.server.run.run_workers` uses ``uvicorn.run``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from socket import socket
from weakref import WeakKeyDictionary

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import multiprocess
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from service.http.server.signals import ENDING, end_on_signals

log = logging.getLogger("fxserve")

_PARENT_SECONDS = 1.0
"""Seconds between two checks of a server process that its supervisor exists."""

if any([*signature(kind).parameters] != ["config", "sockets"] for kind in (Multiprocess, Process)):
    raise ImportError("uvicorn's supervisor takes other arguments")
_MISSING = {
    *({"keep_subprocess_alive", "run"} - {*dir(Multiprocess)}),
    *({"processes"} - {*Multiprocess.__init__.__code__.co_names}),
    *({"is_alive", "start", "kill", "join", "target"} - {*dir(Process)}),
    *({"process", "parent_conn", "get_subprocess"} - {*Process.__init__.__code__.co_names}),
}
if _MISSING:
    raise ImportError(f"uvicorn's supervisor lacks {', '.join(sorted(_MISSING))}")


def fork_processes() -> None:
    """Make uvicorn fork server processes instead of spawning them, so that they share the memory of imported modules.

    This process must not have threads that hold locks, and must not have used CUDA.
    """
    multiprocess.get_subprocess = _forked  # type: ignore[assignment, attr-defined]


def _forked(config: uvicorn.Config, target: Callable[..., None], sockets: list[socket]) -> BaseProcess:
    return _Forked(target=_serve, args=(config, target, sockets))


class _Forked(ForkProcess):
    """A forked process that blocks signals until it has its own handlers.

    The supervisor's handlers, which it inherits, would only record the signals.
    """

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(config: uvicorn.Config, target: Callable[..., None], sockets: list[socket]) -> None:
    end_on_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    config.configure_logging()
    target(sockets=sockets)


class Supervised(Process):
    """A server process that ends when its supervisor is killed.

    Nobody could end it otherwise, and it would keep the port from the next server.
    """

    def target(self, sockets: list[socket] | None = None) -> None:
        threading.Thread(target=_end_with_parent, name="fxserve-supervised", daemon=True).start()
        super().target(sockets)


def _end_with_parent() -> None:
    """Send this process SIGTERM once its parent is gone."""
    parent = multiprocessing.parent_process()
    # The parent's sentinel would not do: other forked processes hold its end of that pipe too.
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(_PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class Supervisor(Multiprocess):
    """A supervisor that replaces a server process as soon as it exits, even while another does not answer pings.

    uvicorn pings one process after another and waits for each. It does not notice that a process is killed meanwhile,
    because the parent holds both ends of the pipe.

    uvicorn ends all processes when one fails to start. This class does so only until one has started: a later failure
    may be temporary, such as a lack of memory or threads.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket]) -> None:
        super().__init__(config, sockets)
        multiprocess.Process = Supervised  # type: ignore[misc]  # uvicorn's methods look it up there
        self._pinged: WeakKeyDictionary[Process, float] = WeakKeyDictionary()
        self._has_served = False

    def keep_subprocess_alive(self) -> None:
        for place, process in enumerate(self.processes):
            if self._may_start_later(process):
                log.error("server process %s failed to start; another is started", process.process.pid)
                process.kill()  # closes its pipe
                process.join()
                process = self.processes[place] = Supervised(self.config, self.sockets)
                process.start()
            process.is_alive = partial(self._is_alive, process)  # type: ignore[method-assign]
        super().keep_subprocess_alive()

    def _may_start_later(self, process: Process) -> bool:
        return self._has_served and process.process.exitcode == STARTUP_FAILURE

    def exit_status(self) -> int:
        """Return the status to exit with after :meth:`run`: a failure if a process could not start."""
        failed = any(process.process.exitcode == STARTUP_FAILURE for process in self.processes)
        return STARTUP_FAILURE if failed else 0

    def _is_alive(self, process: Process, timeout: float) -> bool:
        """Return whether ``process`` is running and responsive.

        It is responsive if it has answered its last ping, or if that was sent less than ``timeout`` seconds ago.
        """
        if not process.process.is_alive():
            return self._may_start_later(process)  # it has just exited; the next turn replaces it
        try:
            while process.parent_conn.poll():
                self._has_served |= process.parent_conn.recv() is True  # any other message means that it is starting
                self._pinged.pop(process, None)
            if process not in self._pinged:
                process.parent_conn.send(b"ping")
                self._pinged[process] = time.monotonic()
        except (OSError, EOFError):
            return False
        return time.monotonic() - self._pinged[process] < timeout
