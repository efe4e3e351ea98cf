"""The priorities of threads."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.service.conftest import Client


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
