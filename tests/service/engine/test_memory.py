"""Memory of a process that serves."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# In a process of its own: how many heaps there may be is settled when the first thread gets one.
SERVED = """
import asyncio, ctypes, sys
from service.app import create_app
from service.settings import Settings

async def main():
    app = create_app(Settings())
    async with app.router.lifespan_context(app):
        await asyncio.gather(*(asyncio.to_thread(bytearray, 10_000) for _ in range(4)))
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
        libc.fflush(None)

asyncio.run(main())
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc's allocator")
def test_all_threads_allocate_from_one_heap() -> None:
    """See malloc_info(3): an element for each of the allocator's heaps."""
    served = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, timeout=600, check=True)
    assert served.stdout.count("<heap nr=") == 1
