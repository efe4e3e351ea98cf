"""Graphs that are drawn in thousands of sizes: so many at a time, and nothing else waits for them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.e2e.conftest import Server


@pytest.mark.exhaustive
def test_many_concurrent_graphs_starve_no_request(server: Server) -> None:
    stop = threading.Event()
    statuses: Counter[int] = Counter()
    waits: list[str] = []

    def draw(number: int) -> None:
        size = 224 + number
        with httpx.Client(base_url=server.url, timeout=120) as http:
            while not stop.is_set():
                response = http.get("/v1/models/resnet18/graph", params={"height": size, "width": size})
                statuses[response.status_code] += 1
                if response.status_code == 429:
                    waits.append(response.headers["retry-after"])
                    time.sleep(0.1)
                size += 50

    image = np.zeros((1, 3, 64, 64), dtype=np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": list(image.shape), "data": image.ravel().tolist()}
    infer = {"inputs": [tensor], "outputs": [{"name": "features.2"}], "parameters": {"weights": "random"}}
    took = {}
    with ThreadPoolExecutor(50) as pool:
        for number in range(50):
            pool.submit(draw, number)
        try:
            while sum(statuses.values()) < 60:
                time.sleep(0.1)
            for model in ("squeezenet1_1", "squeezenet1_0"):  # neither was asked for before: both are traced now
                began = time.monotonic()
                response = server.http.post(f"/v2/models/{model}/infer", json=infer)
                took[model] = time.monotonic() - began
                assert response.status_code == 200, response.text
        finally:
            stop.set()
    assert set(statuses) == {200, 429}
    assert all(int(seconds) >= 1 for seconds in waits)
    assert max(took.values()) < 15, took
