"""How a server ends: told to, under load, with work that will not end, or killed. Last, as it ends the server."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import until
from tests.e2e.faults.app import HANGS
from tests.e2e.faults.conftest import GRACE_PERIOD, Clients, FaultyServer, Weights
from tests.wire import refused


def held(server: FaultyServer, together: Path, responses: list[httpx.Response]) -> threading.Thread:
    """A request that holds the device, in a thread of its own."""
    thread = threading.Thread(target=lambda: responses.append(server.features(HANGS, 1)))
    thread.start()
    until((together / "hanging").exists)
    return thread


def draining(server: FaultyServer) -> bool:
    return "shutting down" in httpx.get(server.url + "/readyz").text


@pytest.mark.exhaustive
def test_killed_and_restarted_then_terminated(
    begin: Callable[..., FaultyServer], weights: Weights, together: Path
) -> None:
    first = begin()
    clients = Clients(first, weights.model)
    clients.ask(good=8)
    broken: list[Exception] = []

    def ask() -> None:
        try:
            for _ in range(1000):
                clients.check(first.features(1), 1)
        except httpx.TransportError as error:
            broken.append(error)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    time.sleep(0.5)
    os.kill(first.process.pid, signal.SIGKILL)
    for thread in asking:
        thread.join()
    assert len(broken) == 4  # cut off, and nobody was told anything wrong

    server = begin()
    clients = Clients(server, weights.model)
    clients.ask()
    assert server.http.get("/readyz").status_code == 200

    # SIGTERM under load: what was accepted is answered, what comes now is told to go elsewhere.
    responses: list[httpx.Response] = []
    slow = held(server, together, responses)
    server.process.terminate()
    until(lambda: draining(server))
    with httpx.Client(base_url=server.url) as fresh:
        assert fresh.get("/healthz").status_code == 200  # new connections are taken too
    late = server.features(3)
    refused(late, "draining", status=503)
    assert int(late.headers["retry-after"]) >= 1
    (together / "release").touch()
    slow.join()
    clients.check(responses[0], HANGS, 1)
    server.process.wait(60)
    (together / "release").unlink()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.exhaustive
def test_work_that_will_not_end(server: FaultyServer, clients: Clients, together: Path) -> None:
    """At the end of the grace period it is told so, and the process ends all the same."""
    clients.ask(good=8)
    responses: list[httpx.Response] = []
    slow = held(server, together, responses)
    began = time.monotonic()
    server.process.terminate()
    slow.join()
    assert time.monotonic() - began >= GRACE_PERIOD - 0.5
    refused(responses[0], "draining", status=503)
    server.process.wait(60)
