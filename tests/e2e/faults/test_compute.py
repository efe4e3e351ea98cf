"""A model, a decoder or the clock misbehaves in a running server. Each costs the requests it is about and no other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import safetensors.torch

from tests.e2e.conftest import until
from tests.e2e.faults.app import DECODER_DIES, DECODER_HAS_NO_MEMORY, DIES, HANGS, NAN, NO_MEMORY, RAISES, TOO_MANY_ROWS
from tests.e2e.faults.conftest import FEATURES, Clients, FaultyServer

pytestmark = pytest.mark.usefixtures("sound")


def problems(responses: list[httpx.Response]) -> set[tuple[int, str]]:
    return {(response.status_code, response.json()["type"]) for response in responses}


def test_a_model_that_raises(clients: Clients) -> None:
    responses = clients.ask([RAISES] * 5)
    assert len(responses) == 5
    assert problems(responses) == {(500, "/problems/compute-failed")}
    assert "ValueError: the model does not like this row" in responses[0].json()["detail"]


def test_a_model_that_returns_nan(clients: Clients, server: FaultyServer) -> None:
    for response in clients.ask([NAN] * 3):
        assert response.status_code == 200
        assert all(values.isnan().all() for values in safetensors.torch.load(response.content).values())
    document = server.features(NAN, accept="application/json").json()
    assert all(set(output["data"]) == {None} for output in document["outputs"])


def test_no_memory_for_a_row(clients: Clients) -> None:
    responses = clients.ask([NO_MEMORY] * 5)
    assert problems(responses) == {(503, "/problems/out-of-memory")}
    assert all(int(response.headers["retry-after"]) >= 1 for response in responses)


def test_no_cuda_memory_for_a_batch(clients: Clients, server: FaultyServer) -> None:
    for response in clients.ask([TOO_MANY_ROWS] * 5):
        clients.check(response, TOO_MANY_ROWS)
    clients.check(server.features(TOO_MANY_ROWS, 1, 2, 3), TOO_MANY_ROWS, 1, 2, 3)
    assert server.metric('fxserve_batch_failures_total{cause="out_of_memory"}') > 0


def test_a_device_thread_that_dies(clients: Clients, server: FaultyServer) -> None:
    """The batch that it held is told to come again; what waited is computed by the thread that takes over."""
    restarts = server.metric("fxserve_worker_restarts_total ")
    response = server.features(DIES)
    assert problems([response]) == {(503, "/problems/not-ready")}
    assert "SystemExit: the device thread ends here" in response.json()["detail"]
    assert response.headers["retry-after"] == "1"
    # Not among others: a batch is told as a whole, and which rows share it is chance.
    waiting = [threading.Thread(target=clients.ask, args=((), 4, 2)) for _ in range(3)]
    responses = [server.features(DIES) for _ in range(2)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert problems(responses) == {(503, "/problems/not-ready")}
    assert server.metric("fxserve_worker_restarts_total ") == restarts + 3


@pytest.mark.exhaustive
def test_a_model_that_hangs(clients: Clients, server: FaultyServer, together: Path) -> None:
    """No thread can be ended from outside. Clients are told in time, and /readyz says so until it moves again."""
    made = server.http.post("/v1/extractors", json={"model": "faulty", "return_nodes": ["conv"]}).json()
    profile = f"/v1/extractors/{made['id']}/graph?profile=true"
    with ThreadPoolExecutor(4) as pool:
        hung = pool.submit(server.features, HANGS, 1, **{"x-request-timeout": "4"})
        until((together / "hanging").exists)
        waited = pool.submit(server.features, 2, **{"x-request-timeout": "1"})
        profiles = [pool.submit(server.http.get, profile) for _ in range(2)]
    assert problems([one.result() for one in (hung, waited, *profiles)]) == {(504, "/problems/deadline-exceeded")}
    until(lambda: server.http.get("/readyz").status_code == 503)
    assert "has been busy with one batch" in server.http.get("/readyz").json()["reason"]
    refused = server.features(3)
    assert problems([refused]) == {(503, "/problems/not-ready")}
    assert server.http.get("/v1/models/faulty/nodes").status_code == 200  # what needs no device goes on
    (together / "release").touch()
    until(lambda: server.http.get("/readyz").status_code == 200)
    (together / "release").unlink()


@pytest.mark.parametrize(
    ("crafted", "problem"),
    [(DECODER_DIES, (500, "/problems/compute-failed")), (DECODER_HAS_NO_MEMORY, (503, "/problems/out-of-memory"))],
)
def test_a_decoder_that_dies_on_a_file(
    clients: Clients, server: FaultyServer, photos: dict[str, bytes], crafted: bytes, problem: tuple[int, str]
) -> None:
    def send(data: bytes) -> httpx.Response:
        return server.http.post(FEATURES.format("faulty"), content=data, headers={"content-type": "image/jpeg"})

    right = send(photos["coffee"]).content
    # More than there are threads to lose.
    assert problems([send(photos["coffee"] + crafted) for _ in range(6)]) == {problem}
    files = [("a", ("a.jpg", photos["coffee"])), ("b", ("b.jpg", photos["coffee"] + crafted))]
    assert problems([server.http.post(FEATURES.format("faulty"), files=files)]) == {problem}
    assert send(photos["coffee"]).content == right


def test_the_clock_jumps(clients: Clients, server: FaultyServer, together: Path) -> None:
    """A day forth and two back, while requests wait: deadlines and waits are on another clock."""
    clock = together / "clock"
    stop = threading.Event()

    def jump() -> None:
        while not stop.is_set():
            for seconds in ("86400", "-86400", "0"):
                clock.write_text(seconds)
                time.sleep(0.02)

    jumping = threading.Thread(target=jump)
    jumping.start()
    try:
        clients.ask(good=80)
        late = server.features(5, **{"x-request-timeout": "0.000001"})
        assert problems([late]) == {(504, "/problems/deadline-exceeded")}
    finally:
        stop.set()
        jumping.join()
        clock.unlink()
