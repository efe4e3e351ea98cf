"""A server whose user may start no more threads, as ``ulimit -u`` or a container's limit says."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from fxcore.backends.residents import FIXED_MODELS
from service.engine.placement import BUSY_SECONDS
from tests.e2e.conftest import InterpretedServer, Server, servers, until
from tests.hostile_images import saved
from tests.wire import created, refused, sent

pytest.importorskip("openvino")
pytestmark = pytest.mark.skipif(
    shutil.which("prlimit") is None or (os.getuid() == 0 and shutil.which("setpriv") is None),
    reason="the limit does not apply to root, and there is no setpriv, or no prlimit",
)

NOBODY = "65534"


def as_unprivileged_user() -> list[str]:
    """What a command of root's begins with, to be run by another user who may read root's files."""
    if os.getuid() != 0:
        return []
    rights = "+dac_override,+dac_read_search"
    user = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
    return ["setpriv", *user, "--inh-caps", rights, "--ambient-caps", rights]


class LimitedServer(InterpretedServer):
    """A server that is not root's, for whom alone ``ulimit -u`` is without effect; it may read root's files."""

    def command(self) -> list[str]:
        return [*as_unprivileged_user(), *super().command()]

    def threads(self) -> int:
        """Of all processes of its user, which is what the limit is for."""
        user = psutil.Process(self.process.pid).uids().real
        processes = [p.info for p in psutil.process_iter(["uids", "num_threads"])]
        return sum(p["num_threads"] for p in processes if p["uids"] is not None and p["uids"].real == user)

    def limit(self, threads: int | str) -> None:
        """Set the soft limit of the running process, as its own user may."""
        command = ["prlimit", "--pid", str(self.process.pid), f"--nproc={threads}:"]
        subprocess.run([*as_unprivileged_user(), *command], check=True)

    def extractor(self, node: str, backend: str) -> httpx.Response:
        spec = {"model": "squeezenet1_1", "weights": "random", "return_nodes": [node], "backend": backend}
        return self.http.post("/v1/extractors", json=spec, params={"wait": 200})


@pytest.fixture(scope="module")
def start_limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LimitedServer]]:
    with servers(LimitedServer, tmp_path_factory.mktemp("torch-home")) as start:
        yield start


@pytest.mark.exhaustive
def test_a_shortage_is_no_fault_of_the_client(start_limited: Callable[..., LimitedServer], tmp_path: Path) -> None:
    server = start_limited(cache_dir=tmp_path)
    assert server.extractor("features.3", "openvino").status_code == 201
    ready = server.http.get("/readyz")
    assert ready.status_code == 200, ready.text
    before, _ = resource.getrlimit(resource.RLIMIT_NPROC)  # the server's, too
    until(lambda: not psutil.Process(server.process.pid).children())  # whose threads would come free

    def steady() -> int:
        """How many threads there are, once none has ended for a second: those would come free, too."""
        count = server.threads()
        time.sleep(1)
        return count if server.threads() == count else 0

    server.limit(until(steady) + 2)

    def answered(response: httpx.Response) -> Any:
        assert response.status_code in (200, 201), response.text
        return response.json()

    for model in ("resnet18", "alexnet"):  # traced and drawn for the first time
        assert answered(server.http.get(f"/v1/models/{model}/graph"))["model"] == model
        answered(server.http.get(f"/v1/models/{model}/nodes"))
    eager = answered(server.extractor("features.4", "eager"))
    image = saved(Image.new("RGB", (64, 64), (90, 60, 30)), "JPEG")
    features = server.http.post(f"/v1/extractors/{eager['id']}/features", **sent(image))
    assert answered(features)["images"] == 1
    assert server.metric("fxserve_ready") == 0
    for _ in range(2):
        refused(server.extractor("features.5", "openvino"), "not-ready", "thread", status=503)
    refused(server.http.get("/readyz"), "not-ready", "threads left", status=503)

    server.limit(before)
    until(lambda: server.http.get("/readyz").status_code == 200)
    # A failed build is tried again after a pause.
    until(lambda: server.extractor("features.5", "openvino").status_code in (200, 201))


@pytest.mark.exhaustive
def test_threads_are_bounded_whatever_the_number_of_extractors(start: Callable[..., Server], tmp_path: Path) -> None:
    """OpenVINO starts two for each compiled model, of which each batch size may have one of its own."""
    server = start(compute_threads=2, cache_dir=tmp_path)
    threads = psutil.Process(server.process.pid).num_threads

    def make(key: str) -> None:
        """Another extractor of the same graph, which is compiled once, and a batch of each size."""
        spec = {"model": "squeezenet1_1", "weights": "random", "backend": "openvino"}
        made = created(server.http, **spec, return_nodes={"features.5": key})
        for rows in (1, 2, 3, 4, 6, 8):
            path = f"/v1/extractors/{made['id']}/features?preprocess=none&pool=avg"
            batch = np.zeros((rows, 3, 224, 224), np.float32)
            assert server.http.post(path, **sent(batch)).status_code == 200

    make("first")
    first = threads()
    for number in range(5):  # without a bound, of 72 threads with the last
        make(f"key{number}")
    time.sleep(BUSY_SECONDS)  # those used since may be more than are usual
    make("last")
    until(lambda: threads() <= first + 2 * (15 + FIXED_MODELS), 30)
