"""Threads that torch may use, and calls into other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import torch

from service.engine.errors import contained

T = TypeVar("T")


def compute_with(threads: int) -> None:
    """Let torch use ``threads`` threads for what the calling thread computes, whatever other threads choose.

    ``set_num_threads`` alone does not do it: a thread that computes for the first time takes over the number that any
    thread set last. Asking for the number is such a first time, and later choices of others do not reach this thread.
    """
    torch.set_num_threads(threads)
    torch.get_num_threads()


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
            raise contained(error) from error.__cause__

    return await asyncio.get_running_loop().run_in_executor(pool, call)
