"""Images that were made to cost much, sent to a real server: everybody else is served meanwhile."""

from __future__ import annotations

import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil

from tests.e2e.conftest import Server
from tests.hostile_images import png


def test_metadata_bombs_delay_no_request(server: Server) -> None:
    """Eight requests of three images with 64 texts of a megabyte each took 52 s, and /healthz waited 5 s meanwhile."""
    text = (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(10**6), 9))
    image = png(1, 1, *[text] * 64, (b"IDAT", zlib.compress(b"\0\0")))
    assert len(image) < 70_000
    path = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.2&pool=avg"
    files = [("file", (f"{index}.png", image, "image/png")) for index in range(3)]
    assert server.http.post(path, files=files).status_code == 200
    process, slowest = psutil.Process(server.process.pid), 0.0
    with ThreadPoolExecutor(8) as pool:
        began = sum(process.cpu_times()[:2])
        responses = [pool.submit(httpx.post, server.url + path, files=files, timeout=60) for _ in range(8)]
        while not all(response.done() for response in responses):
            asked = time.monotonic()
            assert server.http.get("/healthz").status_code == 200
            slowest = max(slowest, time.monotonic() - asked)
        assert [response.result().status_code for response in responses] == [200] * 8
    # What a machine that does other things meanwhile gives to those does not count.
    assert sum(process.cpu_times()[:2]) - began < 20
    assert slowest < 4
