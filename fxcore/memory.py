"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys
from collections.abc import Callable

import torch
from torch.fx import graph_module

LIVE_ACTIVATIONS = 3
"""Estimated number of largest activations that are alive at the same time: an input, its output and a residual."""

_SOURCES = 256
"""Maximum number of generated sources to keep; the latest are kept."""

_M_ARENA_MAX = -8
"""The mallopt parameter of this name, from glibc's malloc.h."""


def use_one_heap() -> None:
    """Make all threads allocate from one heap; call this before a process starts threads that allocate.

    glibc has a heap (arena) for each of up to eight threads per core. Memory that is freed in one arena is not
    available to other threads, and ``malloc_trim`` shrinks only the end of the first. With other C libraries, do
    nothing.
    """
    mallopt = _of_libc("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Collect reference cycles, such as modules and graphs, and return the allocator's free pages to the system.

    Each time a mapped block is freed, glibc raises the size from which it maps blocks (mallopt(3),
    ``M_MMAP_THRESHOLD``, up to 32 MiB). So most weights end up in the heap, and glibc by itself returns only its end.
    """
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    _forget_sources()
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if there is no such function, as on musl and macOS."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def _forget_sources() -> None:
    """Drop all but the latest sources that torch.fx keeps for tracebacks.

    torch.fx keeps the source of every GraphModule, alive or not, so a process that builds extractors would grow
    forever.
    """
    # The cache is private; without it there is nothing to drop.
    sources = getattr(getattr(graph_module, "_loader", None), "eval_cache", {})
    for name in list(sources)[:-_SOURCES]:
        sources.pop(name, None)
        linecache.cache.pop(name, None)
