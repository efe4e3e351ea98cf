"""Threads that torch may use, and memory that nobody does."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import torch


def compute_with(threads: int) -> None:
    """Let torch use ``threads`` threads for what the calling thread computes, whatever other threads choose.

    ``set_num_threads`` alone does not do it: a thread that computes for the first time takes over the number that any
    thread set last. Asking for the number is such a first time, and later choices of others do not reach this thread.
    """
    torch.set_num_threads(threads)
    torch.get_num_threads()


def give_back_memory() -> None:
    """Return freed memory to the system, which glibc keeps for itself after a build's large temporary tensors."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library, which has no such call
        ctypes.CDLL("libc.so.6").malloc_trim(0)
