"""Threads that torch may use."""

from __future__ import annotations

import torch


def compute_with(threads: int) -> None:
    """Let torch use ``threads`` threads for what the calling thread computes, whatever other threads choose.

    ``set_num_threads`` alone does not do it: a thread that computes for the first time takes over the number that any
    thread set last. Asking for the number is such a first time, and later choices of others do not reach this thread.
    """
    torch.set_num_threads(threads)
    torch.get_num_threads()
