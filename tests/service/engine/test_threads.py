"""The roles of threads, and their priorities."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from service.engine.threads import Threads, in_pool
from service.settings import Settings
from tests.service.conftest import Client
from tests.service.engine.running import PATIENCE


def nice(thread: threading.Thread | None = None) -> int:
    return os.getpriority(os.PRIO_PROCESS, (thread.native_id or 0) if thread else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_lookups_have_a_low_priority(make_client: Callable[..., Client]) -> None:
    async def nice_of_event_loop() -> int:
        return nice()

    own, others = nice(), set(threading.enumerate())
    client = make_client(decode_threads=2)
    threads = [thread for thread in threading.enumerate() if thread not in others]
    [worker] = [thread for thread in threads if thread.name == "fxserve-cpu"]
    low = [thread for thread in threads if thread.name.startswith("fxserve-lookup")]
    assert low
    deadline = time.monotonic() + 60  # they do it themselves
    while {*map(nice, low)} != {min(own + 10, 19)} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {*map(nice, low)} == {min(own + 10, 19)}
    assert nice(worker) == client.run(nice_of_event_loop()) == own


@pytest.mark.anyio
async def test_work_that_takes_long_holds_up_no_other_kind() -> None:
    threads, free = Threads(Settings(device="cpu"), torch.device("cpu")), threading.Event()
    threads.start()
    short = (threads.intake, threads.encoders, threads.chores, threads.foreground)
    long = (threads.builders, threads.downloads, threads.background, threads.exports, threads.pictures, threads.lookups)
    try:
        for index, pool in enumerate(long):
            for _ in range(2 * pool.size):
                pool.submit(free.wait, PATIENCE)
            async with asyncio.timeout(PATIENCE / 2):
                for other in (*short, *long[index + 1 :], threads.listings):
                    assert await in_pool(other, lambda: True)
            decoded = threading.Event()
            threads.decoders.work.put(decoded.set)
            assert decoded.wait(PATIENCE / 2)
    finally:
        free.set()
        threads.close()
