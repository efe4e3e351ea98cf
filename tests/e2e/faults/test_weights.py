"""Weights that cannot be had, or are not what they should be: told as such, and taken once they are right."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import until
from tests.e2e.faults.app import STALL_SECONDS
from tests.e2e.faults.conftest import Clients, FaultyServer, Weights
from tests.wire import refused

pytestmark = pytest.mark.usefixtures("sound")


@pytest.fixture
def cache(server: FaultyServer) -> Path:
    return server.log.parent / "hub/checkpoints"


@pytest.fixture(autouse=True)
def _weights_are_right_again(weights: Weights) -> Iterator[None]:
    yield
    weights.sent, weights.stall_after = weights.data, None


def unavailable(response: httpx.Response) -> str:
    """The detail of the problem."""
    return str(refused(response, "weights-unavailable", status=503)["detail"])


def taken(server: FaultyServer, clients: Clients, model: str, cache: Path, weights: Weights) -> None:
    """That the weights are there once the build may be tried again, whole, and that nothing else was left behind."""
    until(lambda: server.features(1, model=model).status_code == 200)
    clients.check(server.features(1, 2, model=model), 1, 2)
    [file] = cache.glob(f"{model}-*")
    assert file.read_bytes() == weights.data
    assert {path.name.partition("-")[0] for path in cache.iterdir()} <= {
        "faulty", "stalls", "wrong_hash", "disk_full", "half_written",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_a_download_that_stalls(server: FaultyServer, clients: Clients, cache: Path, weights: Weights) -> None:
    weights.stall_after = len(weights.data) // 2
    weights.resumed.clear()
    responses: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: responses.append(server.features(1, model="stalls")))
    began = time.monotonic()
    asking.start()
    clients.ask()  # nobody else waits for it
    asking.join()
    weights.resumed.set()
    assert time.monotonic() - began >= STALL_SECONDS
    assert "timed out" in unavailable(responses[0])
    assert not list(cache.glob("stalls*"))
    weights.stall_after = None
    taken(server, clients, "stalls", cache, weights)


@pytest.mark.exhaustive
def test_downloads_keep_no_build_waiting(
    begin: Callable[..., FaultyServer], clients: Clients, weights: Weights
) -> None:
    """As many as there are threads that build, of which this server has one."""
    server = begin(build_threads=1)
    cache = server.log.parent / "hub/checkpoints"
    for file in cache.glob("stalls-*"):  # another test may have downloaded it
        file.unlink()
    weights.stall_after = len(weights.data) // 2
    weights.resumed.clear()
    responses: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: responses.append(server.features(1, model="stalls")))
    asking.start()
    until(lambda: list(cache.glob(".stalls-*.part")))  # it has begun
    clients.check(server.features(1, 2), 1, 2)
    assert not responses
    weights.resumed.set()
    asking.join()
    unavailable(responses[0])
    server.stop()


@pytest.mark.exhaustive
def test_a_download_with_the_wrong_hash(server: FaultyServer, clients: Clients, cache: Path, weights: Weights) -> None:
    weights.sent = weights.data[:-1] + b"x"
    assert "SHA-256 hash" in unavailable(server.features(1, model="wrong_hash"))
    assert not list(cache.glob("wrong_hash*"))
    weights.sent = weights.data
    taken(server, clients, "wrong_hash", cache, weights)


@contextlib.contextmanager
def full(server: FaultyServer, cache: Path) -> Iterator[str]:
    """A cache on a disk of a megabyte, and what is said of writing more to it. Where mounting is not allowed, a limit
    on the size of files stands in, which any user can set for a process of theirs."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(cache)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0:
        try:
            yield "No space left on device"
        finally:
            subprocess.run(["umount", str(cache)], check=True)
        return
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        yield "File too large"
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)


@pytest.mark.exhaustive
def test_a_disk_that_is_full(server: FaultyServer, clients: Clients, cache: Path, weights: Weights) -> None:
    assert len(weights.data) > 2_000_000
    with full(server, cache) as said:
        before = set(cache.iterdir())
        assert said in unavailable(server.features(1, model="disk_full"))
        clients.ask()
        assert set(cache.iterdir()) == before  # nothing of it is left, under any name
    taken(server, clients, "disk_full", cache, weights)


@pytest.mark.exhaustive
def test_a_file_that_is_half_written(server: FaultyServer, clients: Clients, cache: Path, weights: Weights) -> None:
    file = cache / f"half_written-{weights.digits}.pth"
    for damaged in (weights.data[: len(weights.data) // 2], b""):
        file.write_bytes(damaged)
        assert "damaged" in unavailable(server.features(1, model="half_written"))
        time.sleep(1.0)  # before which the build would not be tried again
    file.unlink()
    taken(server, clients, "half_written", cache, weights)
