"""Threads: how many torch uses, their priorities, and pools of them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from fxcore.process import check_threads
from service.engine.errors import as_exception

T = TypeVar("T")


class RunInThread(Protocol):
    """Calls a function in a thread, and returns what it returns."""

    async def __call__(self, function: Callable[[], T], /) -> T: ...


_NICENESS = 10
"""Niceness of the threads that run at a low priority, above the process's own."""

# Read once: a reused thread must not get a lower priority each time, and cannot raise it again.
_OWN = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0

_SPARE = 8
"""Threads that the system must have left for a build."""

MAX_THREADS = 256
"""Maximum threads that all compiled models may have together."""


def thread_trouble() -> str | None:
    """Why nothing can be built now: the system has too few threads left for this process. None if it has enough."""
    try:
        check_threads(_SPARE)
    except RuntimeError as error:
        return f"the system has no {_SPARE} threads left for this process: {error}"
    return None


class Pool(ThreadPoolExecutor):
    """A pool that can start all its threads at once: later the system may have none left.

    Args:
        threads: how many.
        name: of the threads, followed by a number.
        initializer: what each thread calls first, with ``arguments``.
    """

    def __init__(
        self, threads: int, name: str, initializer: Callable[..., None] | None = None, *arguments: Any
    ) -> None:
        super().__init__(threads, name, initializer, arguments)
        self._threads_wanted = threads

    def start(self) -> None:
        """Start all threads.

        Raises:
            RuntimeError: the system has no thread left.
        """
        together = threading.Barrier(self._threads_wanted)
        try:
            for _ in range(self._threads_wanted):
                self.submit(together.wait)  # each blocks its thread until all have started
        except RuntimeError:
            together.abort()
            raise


def compute_with(threads: int) -> None:
    """Let torch use ``threads`` threads for what the calling thread computes, whatever other threads set.

    ``set_num_threads`` alone is not enough: a thread's first operation takes the number that any thread set last.
    ``get_num_threads`` counts as that first operation, after which other threads' settings have no effect on it.
    """
    torch.set_num_threads(threads)
    torch.get_num_threads()


def compute_on(device: torch.device, threads: int) -> None:
    """:func:`compute_with`, and make ``device`` the calling thread's current CUDA device, which is the first one by
    default."""
    compute_with(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def run_at_low_priority() -> None:
    """Lower the priority of the calling thread below the device worker's, and let torch use no other thread for it.

    For work that takes a core for long, such as tracing. All requests wait for the device worker, and each
    layer's work is shared among its threads, so that a delay of one delays all. Only Linux has a priority for each
    thread.
    """
    compute_with(1)
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _OWN + _NICENESS)


def alone(function: Callable[[], T]) -> T:
    """Call ``function``, in which torch uses the calling thread only, as other cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


async def in_pool(pool: Executor, function: Callable[..., T], *args: object) -> T:
    """Call ``function(*args)`` in a thread of ``pool``. Exceptions that would end the event loop become others; see
    :func:`service.engine.errors.as_exception`."""

    def call() -> T:
        try:
            return function(*args)
        except BaseException as error:
            seen = as_exception(error)
            raise seen from error.__cause__ if seen is error else None

    try:
        running = asyncio.get_running_loop().run_in_executor(pool, call)
    except RuntimeError as error:  # the pool could not start its first thread
        raise as_exception(error) from None
    return await running
