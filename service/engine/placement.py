"""The device that extractors run on, and the maximum number of compiled extractors."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from fxcore.backends.openvino import THREADS_EACH
from service.engine.threads import MAX_THREADS
from service.machine import available_threads

_SHARE = 1 / 4
"""Share of this process's threads that compiled extractors may use. The service itself, models of a fixed size and
compiler processes need the rest."""

_USUAL = 16
"""While this many compiled extractors are in use, no other extractor is upgraded from eager."""

BUSY_SECONDS = 10.0
"""Seconds after its last request for which a compiled extractor counts as in use. Without it, extractors in use would
keep replacing each other."""


class CompiledLimits(NamedTuple):
    """Limits on the number of compiled OpenVINO extractors, each of which has its own threads.

    Attributes:
        usual: extractors beyond it that were not used for :data:`BUSY_SECONDS` are evicted, and another is upgraded in
            the background only if one of those can make room.
        most: extractors beyond it that have no request in flight are evicted. Both evict the least recently used first.
    """

    usual: int
    most: int


def compiled_limits(compute_threads: int) -> CompiledLimits:
    """Return the limits for this machine.

    With ``compute_threads=1``, OpenVINO uses the calling thread and needs no other.
    """
    if compute_threads == 1:
        return CompiledLimits(MAX_THREADS, MAX_THREADS)
    limit = available_threads()
    threads = MAX_THREADS if limit is None else min(MAX_THREADS, int(_SHARE * limit))
    most = max(1, threads // THREADS_EACH)
    return CompiledLimits(min(_USUAL, most), most)


def pick_device(asked: str) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` on this machine.

    Raises:
        ValueError: it is none of these, or the machine does not have it.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]?))?", asked) is None:
        raise ValueError(f"device {asked!r} is not supported; use auto, cpu, cuda or cuda:N")
    device = torch.device(asked)
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {asked!r} is not available; torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)
