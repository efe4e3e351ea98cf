"""A supervisor that replaces server processes as soon as they exit.

It subclasses private classes of uvicorn. If they have changed, importing this module raises ImportError, and
:func:`service.http.server.run_workers` uses ``uvicorn.run``.
"""

from __future__ import annotations

import time
from functools import partial
from socket import socket
from weakref import WeakKeyDictionary

import uvicorn
from uvicorn.supervisors.multiprocess import Multiprocess, Process

_MISSING = {
    *({"keep_subprocess_alive", "run"} - {*dir(Multiprocess)}),
    *({"processes"} - {*Multiprocess.__init__.__code__.co_names}),
    *({"is_alive"} - {*dir(Process)}),
    *({"process", "parent_conn"} - {*Process.__init__.__code__.co_names}),
}
if _MISSING:
    raise ImportError(f"uvicorn's supervisor lacks {', '.join(sorted(_MISSING))}")


class Supervisor(Multiprocess):
    """Replaces a server process as soon as it exits, even while another does not answer pings.

    uvicorn pings one process after another and waits for each. It does not notice when a process is killed meanwhile,
    since the parent holds the other end of the pipe too.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket]) -> None:
        super().__init__(config, sockets)
        self._pinged: WeakKeyDictionary[Process, float] = WeakKeyDictionary()

    def keep_subprocess_alive(self) -> None:
        for process in self.processes:
            process.is_alive = partial(self._is_alive, process)  # type: ignore[method-assign]
        super().keep_subprocess_alive()

    def _is_alive(self, process: Process, timeout: float) -> bool:
        """Whether ``process`` runs and has answered its last ping, or still has time to, within ``timeout`` seconds."""
        if not process.process.is_alive():
            return False
        try:
            while process.parent_conn.poll():
                process.parent_conn.recv()
                self._pinged.pop(process, None)
            if process not in self._pinged:
                process.parent_conn.send(b"ping")
                self._pinged[process] = time.monotonic()
        except (OSError, EOFError):
            return False
        return time.monotonic() - self._pinged[process] < timeout
