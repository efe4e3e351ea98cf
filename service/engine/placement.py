"""Where extractors run, and how many of them the system has threads for."""

from __future__ import annotations

import torch

from fxcore.backends.openvino import THREADS_EACH
from service.engine.device.threads import MOST_THREADS
from service.machine import available_threads

_SHARE = 1 / 4
"""Share of the threads of this process that compiled extractors may take. The service itself, models of a fixed size
and compiling processes need the rest."""


def most_compiled(compute_threads: int) -> int:
    """Most extractors that OpenVINO may run at a time, by their threads. With one thread, each computes on the calling
    thread and needs none."""
    limit = available_threads()
    threads = MOST_THREADS if limit is None else min(MOST_THREADS, int(_SHARE * limit))
    return max(1, threads // THREADS_EACH) if compute_threads > 1 else MOST_THREADS


def pick_device(asked: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` stands for on this machine.

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
