"""Which threads go first where cores are short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, because other tests serve from this one's main thread, which lowers its priority for good.
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
decoders = [thread for thread in threads if thread.name.startswith("fxserve-decode")]
deadline = time.monotonic() + 60  # they do it themselves
while own in map(nice, decoders) and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([own, nice(worker), client.run(nice_of_event_loop()), *map(nice, decoders)]))
client.close()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_computing_goes_before_answering_and_that_before_decoding() -> None:
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    own, worker, event_loop, *decoders = json.loads(done.stdout.splitlines()[-1])
    lowest = 19
    assert worker == own
    assert event_loop == min(own + 5, lowest)
    assert decoders == 2 * [min(own + 10, lowest)]
