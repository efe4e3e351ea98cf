"""Classification of system and library errors: which are temporary, and which problem each becomes."""

from __future__ import annotations

import errno

import torch

from fxcore.errors import BadTensor, FxError, summarize
from service.problems import ComputeFailed, NotReady, Problem

# Messages of torch's CPU allocator, of the system, and of CUDA outside torch's allocator.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is an out-of-memory error of the device or the host, which may be temporary."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


_SHORTAGES = ("can't start new thread", "Resource temporarily unavailable", "Too many open files", "std::bad_alloc")
_SHORTAGE_NUMBERS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def is_shortage(error: BaseException | None) -> bool:
    """Return whether ``error``, or its cause, is a shortage of threads, processes, memory or files, often temporary."""
    while error is not None:
        if is_out_of_memory(error) or getattr(error, "errno", None) in _SHORTAGE_NUMBERS:
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def shortage(error: BaseException) -> NotReady:
    """Return the problem for a request that failed because of the shortage ``error``."""
    return NotReady(f"the system is short of threads or memory: {summarize(error)}")


def failure(error: BaseException) -> BadTensor | Problem:
    """Return the error for a request on whose rows the model failed with ``error``."""
    if isinstance(error, BadTensor | Problem):
        return error
    if is_shortage(error):
        return shortage(error)
    return ComputeFailed(f"the model failed on this request: {summarize(error)}", error=summarize(error))


def as_exception(error: BaseException) -> Exception:
    """Convert ``error`` to an exception that can be set on a future.

    A library may raise ``SystemExit`` in any thread; raised from a future, it would stop the event loop.

    A shortage becomes :class:`NotReady`.
    """
    if isinstance(error, FxError | Problem):
        return error
    if is_shortage(error):
        return shortage(error)
    if isinstance(error, Exception):
        return error
    return ComputeFailed(f"work that this request needed was aborted by {summarize(error)}", error=summarize(error))
