"""Threads that torch may use, and calls into other threads."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch

from fxcore.process import check_threads
from service.engine.errors import as_exception

T = TypeVar("T")

_SWITCH_SECONDS = 0.001

ANSWERING, DECODING = 5, 10
"""How far below computing their priority is, in steps of nice, each worth a fifth of a core's time."""

# Read once: a thread that serves a second time must not go lower still, and cannot come back up.
_OWN = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0


def switch_often() -> None:
    """Have threads of this process release the GIL after a millisecond when others wait for it.

    Python's default of five is a fifth of a batch. The device worker waits for the GIL after every forward pass, while
    the event loop answers for the batch before. With one, resnet50 was answered 1.03 times as often at 8 connections,
    and mobilenet_v3_small 1.02 to 1.05 times at 32 and 0.98 to 1.10 times at 8 (medians of seven turns, 2 cores).
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


_SPARE = 8

MOST_THREADS = 256
"""Most threads that compiled models may have."""


def thread_trouble() -> str | None:
    """Why nothing can be built now, if the system has hardly a thread left for this process."""
    try:
        check_threads(_SPARE)
    except RuntimeError as error:
        return f"the system has no {_SPARE} threads left for this process: {error}"
    return None


class Pool(ThreadPoolExecutor):
    """A pool whose threads can be started beforehand: later the system may have none left.

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
            RuntimeError: the system has none left.
        """
        together = threading.Barrier(self._threads_wanted)
        try:
            for _ in range(self._threads_wanted):
                self.submit(together.wait)  # each keeps a thread until all are there
        except RuntimeError:
            together.abort()
            raise


def compute_with(threads: int) -> None:
    """Let torch use ``threads`` threads for what the calling thread computes, whatever other threads choose.

    ``set_num_threads`` alone does not do it: a thread that computes for the first time takes over the number that any
    thread set last. Asking for the number is such a first time, and later choices of others do not reach this thread.
    """
    torch.set_num_threads(threads)
    torch.get_num_threads()


def compute_on(device: torch.device, threads: int) -> None:
    """:func:`compute_with`; and what the calling thread does on CUDA without naming a device, it does on ``device``,
    which for every thread is the first one until it says otherwise."""
    compute_with(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def give_way(steps: int) -> None:
    """Lower the priority of the calling thread, and of those it starts from now on, below the device worker's.

    Everything waits for that one, and each layer's work is shared among its threads, so that a delay of one delays all.
    Decoding comes last because it is ahead anyway. With decoders at 3 to 10 two cores answered 1.08 to 1.11 times
    as much of mobilenet_v3_small at 8 connections, and 1.02 to 1.04 times at 32; with the event loop at 5, too, and
    decoders at 10, 1.04 times that at both, resnet50 and a single connection as before (medians of 15 to 40 turns).
    OpenVINO's own threads come from one that lowers, and keep its priority; with the device worker's it was 0.97 to
    0.98 times as much. Only Linux has a priority for each thread.

    Args:
        steps: :data:`ANSWERING` or :data:`DECODING`.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _OWN + steps)


def decode_only() -> None:
    """Make the calling thread a decoder: torch uses no other thread for it, and it comes after those that compute."""
    compute_with(1)
    give_way(DECODING)


def alone(function: Callable[[], T]) -> T:
    """What ``function()`` returns, torch using the calling thread only: others would wait for a core that has work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


async def in_pool(pool: Executor, function: Callable[..., T], *args: object) -> T:
    """What ``function(*args)`` returns or raises in a thread of ``pool``, so that the event loop survives it."""

    def call() -> T:
        try:
            return function(*args)
        except BaseException as error:
            seen = as_exception(error)
            raise seen from error.__cause__ if seen is error else None

    try:
        running = asyncio.get_running_loop().run_in_executor(pool, call)
    except RuntimeError as error:  # a pool that has no thread yet could not start one
        raise as_exception(error) from None
    return await running
