"""Errors of the system and of libraries: which may pass, and which problem each is."""

from __future__ import annotations

import errno

import torch

from fxcore.errors import FxError, summarize
from service.problems import ComputeFailed, NotReady, Problem

# Messages of torch's CPU allocator, of the system, and of CUDA outside torch's allocator.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means too little memory, on the device or the host, which may pass."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


_SHORTAGES = ("can't start new thread", "Resource temporarily unavailable", "Too many open files", "std::bad_alloc")
_SHORTAGE_NUMBERS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def is_shortage(error: BaseException | None) -> bool:
    """Return whether ``error``, or its cause, means that the system is short of threads, processes, memory or open
    files, which may pass."""
    while error is not None:
        if is_out_of_memory(error) or getattr(error, "errno", None) in _SHORTAGE_NUMBERS:
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def shortage(error: BaseException) -> NotReady:
    """Return the response to a request that failed with ``error``, a shortage."""
    return NotReady(f"the system is short of threads or memory: {summarize(error)}")


def as_exception(error: BaseException) -> Exception:
    """``error`` as an exception that does not end the event loop, as a SystemExit, which a library may raise in any
    thread, would.

    A shortage of the system becomes :class:`NotReady`.
    """
    if isinstance(error, FxError | Problem):
        return error
    if is_shortage(error):
        return shortage(error)
    if isinstance(error, Exception):
        return error
    return ComputeFailed(f"what this request needed was ended by {summarize(error)}", error=summarize(error))
