"""Server processes that are replaced as soon as they have ended, by uvicorn's supervisor.

Classes of uvicorn that are not public are used here. If they are not as expected, importing this module fails, and
:func:`service.http.server.run_workers` uses ``uvicorn.run``.

Raises:
    ImportError: with what is missing.
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
    raise ImportError(f"uvicorn's supervisor is without {', '.join(sorted(_MISSING))}")


class Supervisor(Multiprocess):
    """Replaces a server process as soon as it has ended, even while another does not answer.

    uvicorn pings one process after another and waits for each. A process that is killed meanwhile is not noticed,
    because the parent holds the other end of its pipe, too.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket]) -> None:
        super().__init__(config, sockets)
        self._asked: WeakKeyDictionary[Process, float] = WeakKeyDictionary()

    def keep_subprocess_alive(self) -> None:
        for process in self.processes:
            process.is_alive = partial(self._is_alive, process)  # type: ignore[method-assign]
        super().keep_subprocess_alive()

    def _is_alive(self, process: Process, timeout: float) -> bool:
        """Whether ``process`` runs, and answered a ping within the last ``timeout`` seconds."""
        if not process.process.is_alive():
            return False
        try:
            while process.parent_conn.poll():
                process.parent_conn.recv()
                self._asked.pop(process, None)
            if process not in self._asked:
                process.parent_conn.send(b"ping")
                self._asked[process] = time.monotonic()
        except (OSError, EOFError):
            return False
        return time.monotonic() - self._asked[process] < timeout
