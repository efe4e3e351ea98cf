"""Signal handling of a server process during startup."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT)


def end_on_signals() -> None:
    """Make :data:`ENDING` exit the process at once with code 0.

    While serving, uvicorn's handlers drain first and then raise the signal again, which calls these handlers. During
    startup they are the only ones; without them, the first process of a container would ignore the signals.
    """
    for number in ENDING:
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # A regular exit would free every object of torch first, which takes seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
