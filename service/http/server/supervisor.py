"""A supervisor that replaces server processes as soon as they exit, and can fork them.

It subclasses private classes of uvicorn. If they have changed, importing this module raises ImportError, and
:func:`service.http.server.run.run_workers` uses ``uvicorn.run``.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from socket import socket
from weakref import WeakKeyDictionary

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import multiprocess
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from service.http.server.server import Server
from service.http.server.signals import ENDING, RELOADING, end_on_signals, release_reloads
from service.problems import Problem

log = logging.getLogger("fxserve")

_PARENT_SECONDS = 1.0
"""Seconds between two checks of a server process that its supervisor exists."""

_JOIN_SECONDS = 0.5
"""Maximum seconds until a second signal is passed on to the server processes."""

_SHUTDOWN_SECONDS = 10.0
"""Seconds for a server process to end after the grace period, or after a second signal, before it is killed."""

_EARLY_SECONDS = 10.0
"""Age in seconds below which the end of a server process is early: the next one may end as soon."""

_MIN_DELAY, _MAX_DELAY = 1.0, 60.0
"""Minimum and maximum seconds before a process that ended early is replaced, from the second in a row on. Each leaves a
file of its counters, so replacing them without delay would fill the disk."""

if any([*signature(kind).parameters] != ["config", "sockets"] for kind in (Multiprocess, Process)):
    raise ImportError("uvicorn's supervisor takes other arguments")
_MISSING = {
    *(
        {"handle_hup", "handle_int", "handle_term", "join_all", "keep_subprocess_alive", "run", "terminate_all"}
        - {*dir(Multiprocess)}
    ),
    *({"processes", "should_exit", "signal_queue"} - {*Multiprocess.__init__.__code__.co_names}),
    *({"is_alive", "start", "kill", "join", "pid", "target"} - {*dir(Process)}),
    *({"process", "parent_conn", "get_subprocess", "_server"} - {*Process.__init__.__code__.co_names}),
}
if _MISSING:
    raise ImportError(f"uvicorn's supervisor lacks {', '.join(sorted(_MISSING))}")


def _process(method: str, config: uvicorn.Config, target: Callable[..., None], sockets: list[socket]) -> BaseProcess:
    made: BaseProcess = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=_serve, args=(config, target, sockets)
    )
    return made


def _serve(config: uvicorn.Config, target: Callable[..., None], sockets: list[socket]) -> None:
    end_on_signals()
    if RELOADING:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    config.configure_logging()
    target(sockets=sockets)


class Supervised(Process):
    """A server process that ends when its supervisor is killed.

    Nobody could end it otherwise, and it would keep the port from the next server.

    If its application cannot be created, it fails to start, as if the application's lifespan had failed. uvicorn would
    let it exit with another status, and start another for ever.

    It blocks signals until it has its own handlers: a forked process inherits those of the supervisor, which only
    record the signals, and in a spawned one Python prints a traceback on SIGINT. SIGHUP, which its supervisor passes
    on, stays blocked until the application handles it; without API keys, for good.
    """

    def start(self) -> None:
        if not RELOADING:  # Windows
            super().start()
            return
        if isinstance(self.process, SpawnProcess):
            resource_tracker.ensure_running()  # spawning starts it, which unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, *RELOADING))
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def server(self) -> uvicorn.Server:
        if self._server is None:
            self._server = Server(self.config)
        return self._server

    def target(self, sockets: list[socket] | None = None) -> None:
        threading.Thread(target=_end_with_parent, name="fxserve-supervised", daemon=True).start()
        try:
            super().target(sockets)
        except Exception as error:
            from fxcore.errors import FxError  # imports torch, as the application has done

            if self.server.started:
                raise
            refused = isinstance(error, FxError | Problem | ValueError)
            log.error("the server cannot start: %s", error, exc_info=not refused)
            sys.exit(STARTUP_FAILURE)


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

    On SIGHUP uvicorn replaces the processes one by one. This class passes the signal on instead: a process that ends
    still accepts connections, and refuses their requests, until its own are answered.

    Each SIGTERM is passed on as SIGINT, and vice versa. Ctrl-C and systemd send a signal to all processes, and a second
    one of the same kind makes a process end before its accepted requests are answered.

    A process that hangs, such as in native code that holds the GIL, does not react to signals. uvicorn would wait for
    it forever; this class kills it.

    Args:
        config: of the server processes.
        sockets: what they listen on.
        grace: seconds that they may take to answer accepted requests after a signal.
        method: how they are started: ``spawn``, or ``fork``, so that they share the memory of imported modules. To be
            forked, this process must not have threads that hold locks, and must not have used CUDA.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket], grace: float, method: str) -> None:
        super().__init__(config, sockets)
        self._grace = grace
        self._kill_at = math.inf
        self._first_signal: int | None = None
        multiprocess.get_subprocess = partial(_process, method)  # type: ignore[assignment, attr-defined]
        release_reloads()  # they are handled from now on
        multiprocess.Process = Supervised  # type: ignore[misc]  # uvicorn's methods look it up there
        self._pinged: WeakKeyDictionary[Process, float] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Process, float] = WeakKeyDictionary()  # when it was seen first
        self._delays: WeakKeyDictionary[Process, float] = WeakKeyDictionary()  # of its replacement, if it ends early
        self._due: WeakKeyDictionary[Process, float] = WeakKeyDictionary()  # when one that has ended is replaced
        self._has_served = False

    def handle_hup(self) -> None:
        self._send(signal.SIGHUP)

    def handle_term(self) -> None:
        self._end(signal.SIGINT)

    def handle_int(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        # A second signal of another kind does not hurry them.
        grace = 0.0 if number == self._first_signal else self._grace
        self._first_signal = self._first_signal or number
        self._kill_at = min(self._kill_at, time.monotonic() + grace + _SHUTDOWN_SECONDS)
        self.should_exit.set()
        if RELOADING:
            self._send(number)

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.pid is not None and process.process.is_alive():
                os.kill(process.pid, number)

    def terminate_all(self) -> None:
        if not RELOADING:  # Windows; elsewhere they have been sent a signal
            super().terminate_all()

    def join_all(self) -> None:
        """Wait until all processes have ended, and kill those that hang. A second signal is passed on to them, too."""
        for process in self.processes:
            while process.process.is_alive():
                process.process.join(_JOIN_SECONDS)
                if time.monotonic() >= self._kill_at and process.process.is_alive():
                    log.error("server process %s does not end; it is killed", process.pid)
                    process.kill()
                    process.process.join()
                while self.signal_queue:
                    match self.signal_queue.pop(0):
                        case signal.SIGTERM:
                            self.handle_term()
                        case signal.SIGINT:
                            self.handle_int()

    def keep_subprocess_alive(self) -> None:
        if self.should_exit.is_set():  # they have ended because of it
            return
        for place, process in enumerate(self.processes):
            self._seen.setdefault(process, time.monotonic())
            if self._is_replaced(process) and time.monotonic() >= self._replacement_due(process):
                process.kill()  # closes its pipe
                process.join()
                delay = min(max(2 * self._delays[process], _MIN_DELAY), _MAX_DELAY)
                process = self.processes[place] = Supervised(self.config, self.sockets)
                self._delays[process] = delay
                process.start()
            process.is_alive = partial(self._is_alive, process)  # type: ignore[method-assign]
        super().keep_subprocess_alive()
        if self.should_exit.is_set():  # the first process has failed to start
            self._end(signal.SIGTERM)

    def _is_replaced(self, process: Process) -> bool:
        """Return whether ``process`` has ended and is to be replaced: always, except if it is the first to start."""
        ended = process.process.exitcode
        return ended is not None and (self._has_served or ended != STARTUP_FAILURE)

    def _replacement_due(self, process: Process) -> float:
        """Return when to replace ``process``, which has ended; log its end the first time."""
        if process not in self._due:
            now = time.monotonic()
            early = now - self._seen[process] < _EARLY_SECONDS
            delay = self._delays[process] = self._delays.get(process, 0.0) if early else 0.0
            self._due[process] = now + delay
            when = f" in {delay:g} s" if delay else ""
            log.error("server process %s %s; another is started%s", process.pid, _how_ended(process), when)
        return self._due[process]

    def exit_status(self) -> int:
        """Return the status to exit with after :meth:`run`: a failure if the first processes could not start."""
        failed = any(process.process.exitcode == STARTUP_FAILURE for process in self.processes)
        return STARTUP_FAILURE if failed and not self._has_served else 0

    def _is_alive(self, process: Process, timeout: float) -> bool:
        """Return whether ``process`` is running and responsive.

        It is responsive if it has answered its last ping, or if that was sent less than ``timeout`` seconds ago.
        """
        if not process.process.is_alive():
            return self._is_replaced(process)  # not by uvicorn, but on a later turn
        try:
            while process.parent_conn.poll():
                self._has_served |= process.parent_conn.recv() is True  # any other message means that it is starting
                self._pinged.pop(process, None)
            if process not in self._pinged:
                process.parent_conn.send(b"ping")
                self._pinged[process] = time.monotonic()
        except (OSError, EOFError):
            return False
        responsive = time.monotonic() - self._pinged[process] < timeout
        if not responsive:
            log.error("server process %s has not answered for %g s; another is started", process.pid, timeout)
        return responsive


def _how_ended(process: Process) -> str:
    status = process.process.exitcode
    if status == STARTUP_FAILURE:
        return "failed to start"
    return f"exited with status {status}" if status is None or status >= 0 else f"was ended by signal {-status}"
