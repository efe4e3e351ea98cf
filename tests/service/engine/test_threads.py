"""Which threads go first where cores are short."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_computing_goes_before_answering_and_that_before_decoding(make_client: Callable) -> None:
    def nice(thread: int | None) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread or 0)

    async def nice_of_event_loop() -> int:
        return nice(None)

    own = nice(None)
    before = set(threading.enumerate())
    client = make_client(decode_threads=2)
    started = [thread for thread in threading.enumerate() if thread not in before]
    [worker] = [thread for thread in started if thread.name == "fxserve-cpu"]
    decoders = [thread for thread in started if thread.name.startswith("fxserve-decode")]
    assert client.run(nice_of_event_loop()) == min(own + 5, 19)
    assert nice(worker.native_id) == own
    deadline = time.monotonic() + 10  # they do it themselves
    while {nice(thread.native_id) for thread in decoders} != {min(own + 10, 19)} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [nice(thread.native_id) for thread in decoders] == 2 * [min(own + 10, 19)]
