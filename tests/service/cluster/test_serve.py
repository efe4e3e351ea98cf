"""Two replicas on two nodes of a Ray cluster on this machine, asked through Serve's own proxy or HAProxy."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
import yaml

from tests.conftest import Reference
from tests.e2e.conftest import until
from tests.service.cluster.hanging import HANG

pytest.importorskip("ray.serve")

from ray.serve.schema import ServeDeploySchema

from service.cluster.serve import app

MODEL = "squeezenet1_1"

WINDOW = 5.0
"""Seconds over which rates are compared."""

HANGS_SECONDS = 30
"""After which a batch is taken to hang."""

ROOT = Path(__file__).parents[3]

CLUSTER = """
import json, sys, time
import ray
from ray import serve
from ray.cluster_utils import Cluster

port, dashboard, args = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
store = {"object_store_memory": 200 * 1024**2}
head = {"num_cpus": 1, "include_dashboard": args is None, "dashboard_port": dashboard, **store}
cluster = Cluster(True, head_node_args=head)
cluster.add_node(num_cpus=1, **store)
ray.init(address=cluster.address, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
if args is not None:
    from service.cluster.serve import app
    serve.run(app(args), name="fxserve", route_prefix="/")
print(json.dumps([f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]))
print("serving", flush=True)
for line in sys.stdin:
    serve.run(app(json.loads(line)), name="fxserve", route_prefix="/")
    print("updated", flush=True)
serve.shutdown()
ray.shutdown()
cluster.shutdown()
"""


SERVICE = {"model": MODEL, "weights": "random", "nodes": "features.12=failed", "cpus": 1, "lowering": False}
"""Whether a replica has failed to start is not read from what it says, which has the names of what it preloads."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cluster:
    """A cluster with two nodes of a core each, and the service on it; without ``args``, its dashboard and nothing."""

    def __init__(self, home: Path, haproxy: bool, args: dict[str, Any] | None) -> None:
        self.port, self.dashboard = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.args = args
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "TORCH_HOME": str(home),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_SERVE_ENABLE_HA_PROXY": str(int(haproxy)),
            # Its defaults are fixed ports, which another cluster of these tests may have.
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "no_proxy": "127.0.0.1",
        }
        self.log = (home / "cluster.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(self.port), str(self.dashboard), json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=self.environment,
        )
        assert self.said() == "serving", Path(self.log.name).read_text()[-3000:]

    def said(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("["):
                self.metrics = json.loads(line)
            if line.strip() in ("serving", "updated"):
                return line.strip()
        return "nothing"

    def update(self, **args: Any) -> None:
        assert self.process.stdin is not None
        assert self.args is not None
        self.process.stdin.write(json.dumps(self.args | args) + "\n")
        self.process.stdin.flush()
        assert self.said() == "updated"

    def replicas(self) -> list[int]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):  # not those of another cluster
            with suppress(psutil.Error):  # it has ended
                if re.search("ServeReplica:.*:fxserve", " ".join(child.cmdline())):
                    found.append(child.pid)
        return found

    def ask(self, method: str, path: str, **rest: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=60, **rest)

    def answers(self, path: str) -> bool:
        try:
            return self.ask("GET", path).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


@pytest.fixture(scope="module", params=[False, True], ids=["Serve's proxy", "HAProxy"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("ray")
    models = home / "models"
    models.mkdir()
    (models / "models.toml").write_text('[models.hanging]\nbuilder = "tests.service.cluster.hanging:Hanging"\n')
    stores = {"extractors": str(home / "extractors"), "models_dir": str(models)}
    limits = {"request_timeout": HANGS_SECONDS, "grace_period": 5}
    running = Cluster(home, request.param, SERVICE | {"replicas": 2} | stores | limits)
    yield running
    running.stop()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class Load:
    """Four clients that ask for features until it ends."""

    def __init__(self, url: str, photo: bytes) -> None:
        self.answers: list[tuple[float, int, bytes]] = []
        self._ended = threading.Event()
        self._clients = [threading.Thread(target=self._ask, args=(url, photo)) for _ in range(4)]

    def _ask(self, url: str, photo: bytes) -> None:
        path = f"{url}/v1/models/{MODEL}/features?weights=random&nodes=features.12&pool=avg&encoding=base64"
        while not self._ended.is_set():
            try:
                answer = httpx.post(path, content=photo, headers={"content-type": "image/jpeg"}, timeout=60)
            except httpx.TransportError as error:
                self.answers.append((time.monotonic(), 0, repr(error).encode()))
            else:
                self.answers.append((time.monotonic(), answer.status_code, answer.content))

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for client in self._clients:
            client.join()

    def rate(self, start: float, end: float) -> float:
        """Right answers a second, of those between two times."""
        times = [time for time, status, _ in list(self.answers) if status == 200]
        return sum(start <= time < end for time in times) / (end - start)

    def statuses(self) -> Counter[int]:
        return Counter(status for _, status, _ in self.answers)

    def failures(self) -> set[bytes]:
        return {content for _, status, content in self.answers if status != 200}


@pytest.mark.exhaustive
def test_both_replicas_know_every_extractor(cluster: Cluster, photos: dict[str, bytes], reference: Reference) -> None:
    body = {"content": photos["chelsea"], "headers": {"content-type": "image/jpeg"}}
    assert len(cluster.replicas()) == 2
    ready = cluster.ask("GET", "/readyz", headers={"x-request-id": "mine"})
    assert ready.json()["ready"]
    assert ready.headers["x-request-id"] == "mine"  # once, though Serve adds one too
    spec = {"model": MODEL, "weights": "random", "return_nodes": {"features.12": "C5"}, "name": "r"}
    assert cluster.ask("POST", "/v1/extractors", json=spec).status_code in (200, 201)
    expected = reference(MODEL, "features.12", [photos["chelsea"]]).mean((2, 3))
    for _ in range(12):
        answer = cluster.ask("POST", "/v1/extractors/r/features?pool=avg", **body)
        assert answer.status_code == 200, answer.text
        data = torch.tensor([answer.json()["outputs"][0]["data"]])
        torch.testing.assert_close(data, expected, rtol=1e-3, atol=1e-3)
    assert cluster.ask("DELETE", "/v1/extractors/r").status_code == 204
    time.sleep(2)
    assert {cluster.ask("GET", "/v1/extractors/r").status_code for _ in range(12)} == {404}


@pytest.mark.exhaustive
def test_a_killed_replica_costs_its_own_requests_only(cluster: Cluster, photos: dict[str, bytes]) -> None:
    with Load(cluster.url, photos["chelsea"]) as load:
        until(lambda: len(load.answers) > 40)
        time.sleep(WINDOW)
        killed = time.monotonic()
        before = load.rate(killed - WINDOW, killed)
        psutil.Process(cluster.replicas()[0]).kill()
        until(lambda: len(cluster.replicas()) == 2 and time.monotonic() - killed > 1, 60)

        def rate() -> float:
            now = time.monotonic()
            return load.rate(now - WINDOW, now)

        until(lambda: time.monotonic() - killed > WINDOW and rate() > before / 2, 120)  # 30 s on an idle machine
    right = {content for _, status, content in load.answers if status == 200}
    failed = [status for _, status, _ in load.answers if status != 200]
    assert len(failed) <= 8, load.statuses()  # what was on its way, of four clients
    assert all(status == 0 or status >= 500 for status in failed)
    assert len({json.loads(content)["extractor"] for content in right}) == 1


@pytest.mark.exhaustive
def test_a_rolling_update_loses_nothing(cluster: Cluster, photos: dict[str, bytes]) -> None:
    before = set(cluster.replicas())
    with Load(cluster.url, photos["chelsea"]) as load:
        until(lambda: len(load.answers) > 20)
        cluster.update(max_batch=4)
        count = len(load.answers)
        until(lambda: len(load.answers) > count + 20)
    assert not before & set(cluster.replicas())
    assert not load.failures(), load.statuses()


@pytest.mark.exhaustive
def test_a_replica_whose_device_thread_hangs_is_replaced(cluster: Cluster, photos: dict[str, bytes]) -> None:
    before = set(cluster.replicas())
    row = np.zeros((1, 3, 32, 32), np.float32)
    body = {"headers": {"content-type": "application/x-npy"}}
    path = "/v1/models/hanging/features?nodes=conv&weights=random&preprocess=none&pool=avg"
    assert cluster.ask("POST", path, content=npy(row), **body).status_code == 200
    hung = cluster.ask("POST", path, content=npy(row + HANG), **body)
    assert hung.status_code == 504, hung.text
    until(lambda: len(before & set(cluster.replicas())) == 1 and len(cluster.replicas()) == 2, 180)
    answers = [
        cluster.ask(
            "POST",
            f"/v1/models/{MODEL}/features?weights=random&nodes=features.12&pool=avg",
            content=photos["chelsea"],
            headers={"content-type": "image/jpeg"},
        )
        for _ in range(8)
    ]
    assert {answer.status_code for answer in answers} == {200}
    assert len(before & set(cluster.replicas())) == 1  # the other one was not touched


@pytest.mark.exhaustive
def test_prometheus_sees_every_replica(cluster: Cluster) -> None:
    """On the ports that Ray's agents have for it."""

    def seen() -> bool:
        found = set()
        for address in cluster.metrics:
            text = httpx.get(f"http://{address}/metrics", timeout=10).text
            lines = [line for line in text.splitlines() if line.startswith("ray_fxserve_ready{")]
            found |= {line.partition('replica="')[2].partition('"')[0] for line in lines}
        return len(found) >= 2

    until(seen, 60)


@pytest.mark.exhaustive
def test_serve_build_writes_a_config_that_serve_deploy_takes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ray.serve.scripts", "build", "service.cluster.application:application"]
    environment = os.environ | {"FXSERVE_MAX_INFLIGHT": "77", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "-o", "serve.yaml"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = ServeDeploySchema.model_validate(yaml.safe_load((tmp_path / "serve.yaml").read_text()))
    [application] = config.applications
    [deployment] = application.deployments
    assert application.import_path == "service.cluster.application:application"
    assert (deployment.name, deployment.max_ongoing_requests, deployment.num_replicas) == ("fxserve", 77, 1)
    assert deployment.logging_config.enable_access_log is False


@pytest.mark.exhaustive
def test_serve_deploy_of_a_changed_config_loses_nothing(tmp_path: Path, photos: dict[str, bytes]) -> None:
    """Of what ``serve build`` wrote, with two replicas behind HAProxy."""
    cluster = Cluster(tmp_path, True, None)
    file = tmp_path / "serve.yaml"

    def scripted(*command: str) -> None:
        script = [sys.executable, "-m", "ray.serve.scripts", *command]
        done = subprocess.run(script, env=cluster.environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    def deploy(**settings: str) -> None:
        config = yaml.safe_load(file.read_text())
        config["http_options"] |= {"host": "127.0.0.1", "port": cluster.port}
        [application] = config["applications"]
        application["runtime_env"] = {"env_vars": settings}
        application["deployments"][0]["num_replicas"] = 2
        file.write_text(yaml.safe_dump(config))
        scripted("deploy", "-a", f"http://127.0.0.1:{cluster.dashboard}", str(file))

    try:
        scripted("build", "service.cluster.application:application", "-o", str(file))
        deploy(FXSERVE_LOWERING="false", FXSERVE_EXTRACTORS=str(tmp_path / "extractors"))
        until(lambda: len(cluster.replicas()) == 2, 180)
        until(lambda: cluster.answers("/readyz"), 180)
        before = set(cluster.replicas())
        with Load(cluster.url, photos["chelsea"]) as load:
            until(lambda: len(load.answers) > 20)
            deploy(FXSERVE_LOWERING="false", FXSERVE_MAX_BATCH="4")
            until(lambda: len(cluster.replicas()) == 2 and not before & set(cluster.replicas()), 240)
            count = len(load.answers)
            until(lambda: len(load.answers) > count + 20)
        assert not load.failures(), load.statuses()
    finally:
        cluster.stop()


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="unknown argument modle; valid arguments: model, nodes"):
        app({"modle": "resnet50"})
    with pytest.raises(ValueError, match="cpus='many' is not a number"):
        app({"cpus": "many"})
    with pytest.raises(ValueError, match="need a model"):
        app({"nodes": "C4"})
    assert app({"model": "resnet50", "cpus": "2", "replicas": "2", "max_replicas": 4})
