"""A clock that waits for GPUs."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Return the time in seconds, as of :func:`time.perf_counter`, once the current stream of ``device`` has no work.

    Synchronizing the whole device would break a CUDA graph capture in another thread.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
