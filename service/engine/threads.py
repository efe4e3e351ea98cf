"""The threads of an engine: their roles, torch's thread count in each, and their priorities."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from fxcore.backends.process import check_threads
from service.engine.errors import as_exception
from service.problems import Draining
from service.settings import Settings

T = TypeVar("T")

log = logging.getLogger("fxserve.decoding")


class RunInThread(Protocol):
    """Callable that runs a function in a thread and returns its result."""

    async def __call__(self, function: Callable[[], T], /) -> T: ...


_NICENESS = 10
"""Niceness of low-priority threads, relative to the process's own."""

# Read once: otherwise a reused thread would get a lower priority each time, which it cannot raise again.
_OWN = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0

_SPARE = 8
"""Number of threads that must be available to the process for a build."""

MAX_THREADS = 256
"""Maximum number of threads of all compiled models together."""


def thread_trouble() -> str | None:
    """Return why nothing can be built now: too few threads are left for this process. None if there are enough."""
    try:
        check_threads(_SPARE)
    except RuntimeError as error:
        return f"the system has no {_SPARE} threads left for this process: {error}"
    return None


def compute_with(threads: int) -> None:
    """Make torch use ``threads`` threads for the calling thread's operations, whatever other threads set.

    ``set_num_threads`` alone is not enough: a thread's first operation uses the number that any thread set last.
    ``get_num_threads`` counts as that first operation; later settings of other threads do not affect this one.
    """
    torch.set_num_threads(threads)
    torch.get_num_threads()


def compute_on(device: torch.device, threads: int) -> None:
    """Call :func:`compute_with`, and make ``device`` the calling thread's current CUDA device instead of the first."""
    compute_with(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def run_at_low_priority() -> None:
    """Lower the priority of the calling thread below the device worker's, and make torch use this thread only.

    For work that occupies a core for long, such as tracing. All requests wait for the device worker, which splits each
    layer among its threads, so a delay of one of them delays all. Only Linux has per-thread priorities.
    """
    compute_with(1)
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _OWN + _NICENESS)


def alone(function: Callable[..., T], *args: object) -> T:
    """Call ``function(*args)`` with torch limited to the calling thread, because the other cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*args)
    finally:
        torch.set_num_threads(threads)


class Pool(ThreadPoolExecutor):
    """A thread pool that can start all its threads in advance: later the system may have none left.

    Args:
        threads: number of threads.
        name: prefix of the thread names.
        initializer: called first in each thread, with ``arguments``.

    Attributes:
        size: number of threads.
    """

    def __init__(
        self, threads: int, name: str, initializer: Callable[..., None] | None = None, *arguments: Any
    ) -> None:
        super().__init__(threads, name, initializer, arguments)
        self.size = threads

    def start(self) -> None:
        """Start all threads.

        Raises:
            RuntimeError: the system has no thread left.
        """
        together = threading.Barrier(self.size)
        try:
            for _ in range(self.size):
                self.submit(together.wait)  # each blocks its thread until all have started
        except RuntimeError:
            together.abort()
            raise


async def in_pool(pool: Executor, function: Callable[..., T], *args: object) -> T:
    """Call ``function(*args)`` in a thread of ``pool``.

    Exceptions that would stop the event loop are converted; see :func:`service.engine.errors.as_exception`.

    Raises:
        Draining: the pool was shut down.
    """

    def call() -> T:
        try:
            return function(*args)
        except BaseException as error:
            raise as_exception(error) from error.__cause__

    try:
        running = asyncio.get_running_loop().run_in_executor(pool, call)
    except RuntimeError as error:  # of a pool that was shut down, or could not start its first thread
        raise (Draining() if "shutdown" in str(error) else as_exception(error)) from None
    try:
        return await running
    finally:
        del running  # it holds its error, whose traceback holds this frame


class Decoders:
    """Decoding threads, first come, first served.

    This is not an executor: no caller waits for a single image, and a future for each would cost event loop time.

    Attributes:
        work: the functions to call, each in one of the threads.
    """

    def __init__(self, threads: int) -> None:
        self.work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._main, name=f"fxserve-decode-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads once all queued work is done."""
        for _ in self._threads:
            self.work.put(None)

    def _main(self) -> None:
        compute_with(1)  # the threads share the cores
        while (decode := self.work.get()) is not None:
            try:
                decode()
            except BaseException:  # keep the thread alive
                log.exception("a decoder failed")
            del decode  # so that an idle thread holds no images


class Threads:
    """The threads of an engine, in five roles.

    A running thread cannot be interrupted, so long-running work is bounded by a pool of its own. A role has several
    pools if one kind of work must not wait for another.

    **Device**: the one thread of :class:`~service.engine.device.worker.DeviceWorker`, which replaces it when it dies.

    **Decode**: ``decoders``, and ``intake``, one thread that reads headers and predicts sizes. Admission needs these,
    so it must not wait for the decoding of admitted requests.

    **Work**: ``encoders`` parse bodies and write responses, in milliseconds; ``builders`` trace and build, in seconds.
    Four pools serve slow GET requests: ``lookups`` trace and draw; ``listings`` encode thousands of extractors or
    models, one list at a time; ``pictures`` read from a disk or a bucket and decode, one at a time; ``exports`` take
    minutes and hold a second copy of the weights, one at a time. These four have a low priority, which a thread cannot
    raise again, so none of them can be shared with encoding.

    **IO**: ``chores`` are short and rare, such as writing metrics and reading verdicts; :func:`asyncio.to_thread` runs
    them. ``downloads`` take minutes and almost no CPU; cached models do not wait for them. The shared store has its own
    threads (:class:`~service.engine.extractors.sharing.Sharing`), because its operations hang as long as its bucket
    does.

    **Compile**: ``foreground`` lowers extractors that requests wait for, ``background`` lowers upgrades. Each runs one
    at a time, so no request waits for an upgrade.

    Args:
        settings: the numbers of threads.
        device: the device used by the build and compile threads.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.decoders = Decoders(settings.decode_threads)
        self.intake = Pool(1, "fxserve-intake", compute_with, 1)
        self.encoders = Pool(settings.encode_threads, "fxserve-encode", compute_with, 1)
        self.builders = Pool(settings.build_threads, "fxserve-build", compute_on, device, 1)
        self.lookups = Pool(2, "fxserve-lookup", run_at_low_priority)
        self.listings = Pool(1, "fxserve-lookup-list", run_at_low_priority)
        self.pictures = Pool(1, "fxserve-lookup-picture", run_at_low_priority)
        self.exports = Pool(1, "fxserve-lookup-export", run_at_low_priority)
        self.chores = Pool(2, "fxserve-chore", compute_with, 1)
        self.downloads = Pool(4, "fxserve-download")
        self.foreground = Pool(1, "fxserve-lower", compute_on, device, 1)
        self.background = Pool(1, "fxserve-improve", compute_on, device, 1)
        self._pools = [pool for pool in vars(self).values() if isinstance(pool, Pool)]

    def start(self) -> None:
        """Start all threads.

        ``chores`` becomes the default executor of the running event loop.

        Raises:
            RuntimeError: the system has no thread left.
        """
        asyncio.get_running_loop().set_default_executor(self.chores)
        for pool in self._pools:
            pool.start()
        self.decoders.start()

    def stop_compiling(self) -> None:
        """Start no more lowering."""
        for pool in (self.foreground, self.background):
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Stop all threads once their current work is done."""
        self.decoders.stop()
        # The event loop may keep running and needs a working executor.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
