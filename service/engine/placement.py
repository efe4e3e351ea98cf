"""Where extractors run, and how many of them the system has threads for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fxcore.backends.openvino import THREADS_EACH
from service.engine.threads import MAX_THREADS
from service.machine import available_threads

_SHARE = 1 / 4
"""Share of the threads of this process that compiled extractors may take. The service itself, models of a fixed size
and compiling processes need the rest."""

_USUAL = 16
"""Compiled extractors beside which no other takes over from eager while all are in use."""

BUSY_SECONDS = 10.0
"""Seconds after its last request in which a compiled extractor counts as in use: else those in use would replace each
other."""


class CompiledLimits(NamedTuple):
    """How many extractors OpenVINO may run at a time, as each has threads of its own.

    Attributes:
        usual: those beyond it that were not used for :data:`BUSY_SECONDS` are evicted, and none is added by itself.
        most: none beyond it stays that has no request in flight.
    """

    usual: int
    most: int


def compiled_limits(compute_threads: int) -> CompiledLimits:
    """Return the limits on this machine. With one thread, each computes on the calling thread and needs none of its
    own."""
    if compute_threads == 1:
        return CompiledLimits(MAX_THREADS, MAX_THREADS)
    limit = available_threads()
    threads = MAX_THREADS if limit is None else min(MAX_THREADS, int(_SHARE * limit))
    most = max(1, threads // THREADS_EACH)
    return CompiledLimits(min(_USUAL, most), most)


def pick_device(asked: str) -> torch.device:
    """Return the device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` stands for on this machine.

    Raises:
        ValueError: the machine does not have it.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(asked)
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {asked!r} is not here; torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)
