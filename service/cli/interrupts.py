"""Ctrl-C while a command imports torch, which takes seconds."""

from __future__ import annotations

import signal
from types import FrameType

from service.http.server.signals import end


def end_imports_on_interrupt() -> None:
    """Make Ctrl-C amid an import exit the process at once with code 130.

    A KeyboardInterrupt there may become another error, of a module that is there in part, or be ignored. Anywhere else
    it is raised as usual.
    """
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    place = frame
    while place is not None:
        if place.f_code.co_filename.startswith("<frozen importlib"):
            end(130)
        place = place.f_back
    signal.default_int_handler(number, frame)
