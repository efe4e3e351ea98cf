"""Freed memory, given back to the system."""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys
from collections.abc import Callable

from torch.fx import graph_module

LIVE_ACTIVATIONS = 3
"""How many of the largest activations are taken to be alive at a time: an input, its output and a residual."""

_SOURCES = 256
"""How many generated sources are kept: the latest ones."""

_M_ARENA_MAX = -8
"""mallopt's parameter of this name, from glibc's malloc.h."""


def use_one_heap() -> None:
    """Have all threads allocate from one heap; to be called before a process starts threads that allocate.

    glibc gives up to eight threads per core heaps of their own. What is freed in one is of no use to the others,
    and ``malloc_trim`` leaves the free end of all but the first as it is. With 40 models loaded, run and evicted in
    turn by 3 threads, the heaps held 26 to 42 MiB more than was in use after a trim; one heap held 4 to 9 more. Where
    another C library allocates, nothing changes.
    """
    mallopt = _of_libc("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Collect reference cycles, such as modules and graphs, and let the allocator return its free pages.

    glibc raises the size from which a block is mapped on its own each time such a block is freed (mallopt(3),
    ``M_MMAP_THRESHOLD``, up to 32 MiB), so that most weights come to lie in its heap; of that it returns only the
    end. A process that had loaded and dropped eight models in a row held 2.6 GB where 0.8 were in use.
    """
    gc.collect()
    _forget_sources()
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None where it has none of this name, as on musl and macOS."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def _forget_sources() -> None:
    """Drop what torch.fx remembers of modules that it generated long ago.

    It keeps every module's source for tracebacks, whether the module is alive or not: eight for an extractor over
    resnet50, which take 95 KB. A service that built extractors anew for half an hour grew by 200 MB.
    """
    sources = graph_module._loader.eval_cache
    for name in list(sources)[:-_SOURCES]:
        sources.pop(name, None)
        linecache.cache.pop(name, None)
