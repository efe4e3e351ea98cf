"""The priorities of threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, threading, time
from tests.service.conftest import Client

def nice(thread=None):
    return os.getpriority(os.PRIO_PROCESS, thread.native_id if thread else 0)

async def nice_of_event_loop():
    return nice()

own = nice()
client = Client(decode_threads=2)
threads = threading.enumerate()
[worker] = [thread for thread in threads if thread.name == "fxserve-cpu"]
low = [thread for thread in threads if thread.name.startswith("fxserve-lookup")]
deadline = time.monotonic() + 60  # they do it themselves
while {*map(nice, low)} != {min(own + 10, 19)} and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([own, nice(worker), client.run(nice_of_event_loop()), *map(nice, low)]))
client.close()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_lookups_have_a_low_priority() -> None:
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    own, worker, event_loop, *low = json.loads(done.stdout.splitlines()[-1])
    assert worker == event_loop == own
    assert set(low) == {min(own + 10, 19)}
