"""Compare two Ray Serve replicas with one core each with a single process with two cores, on the same machine.

Then kill a replica under load, and measure the seconds until the rate recovers.

pip install -e '.[openvino,bench,ray]'
python benchmarks/replicas.py > benchmarks/results/replicas-2-cores.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version

import load
import photos
import psutil
from serve import machine, say, shown, table
from servers import Server, free_port, fxserve

CLUSTER = """
import json, sys
import ray
from ray import serve
from ray.cluster_utils import Cluster
from service.cluster.serve import app

port, args = int(sys.argv[1]), json.loads(sys.argv[2])
store = {"object_store_memory": 200 * 1024**2}
cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False, **store})
cluster.add_node(num_cpus=1, **store)
ray.init(address=cluster.address, log_to_driver=False)
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
serve.run(app(args), name="fxserve", route_prefix="/", blocking=True)
"""

WHAT = (
    "JPEG files in, C4 and C5 out as safetensors, on default settings. The replicas are on two nodes of a cluster. The "
    "load, the proxies and Ray's own processes run on the same cores as what they measure."
)

ALONE = "one process, 2 cores"
NODES = "C4,C5"
CONNECTIONS = (32, 1)
SETTLE_SECONDS = 40.0

BACK = 0.9
"""Fraction of the earlier rate at which the rate counts as recovered after a replica was killed."""
BACK_SECONDS = 120.0


@contextlib.contextmanager
def ray_serve(model: str, haproxy: bool) -> Iterator[Server]:
    """Run two one-core nodes with a replica on each."""
    port = free_port()
    args = {"model": model, "weights": "random", "nodes": NODES, "cpus": 1, "replicas": 2}
    environment = {"RAY_SERVE_ENABLE_HA_PROXY": str(int(haproxy)), "RAY_USAGE_STATS_ENABLED": "0"}
    server = Server([sys.executable, "-c", CLUSTER, str(port), json.dumps(args)], port, environment)
    try:
        server.wait("GET", "/readyz")
        yield server
    finally:
        server.stop()


def lowered(server: Server, path: str) -> None:
    """Wait until every process has replaced the eager backend, which happens for extractors in use."""
    seen = 0
    deadline = time.monotonic() + SETTLE_SECONDS
    while seen < 12 and time.monotonic() < deadline:  # enough responses to reach both replicas
        server.http.post(path, content=photos.jpegs()[0], headers={"content-type": "image/jpeg"})
        [extractor] = server.http.get("/v1/extractors").json()["extractors"]
        seen = 0 if extractor["backend"] == "eager" else seen + 1
        time.sleep(0.5)


def measured(server: Server, model: str, seconds: float) -> dict[int, load.Load]:
    """Return the load results by number of connections."""
    lowered(server, features(model))
    requests = photographs(server, model)
    return {
        connections: load.run(server.port, requests, connections, seconds, warm=2.0, wrk=False)
        for connections in CONNECTIONS
    }


def recovery(server: Server, model: str, before: load.Load) -> float:
    """Kill a replica, and return the seconds until recovery, or infinity.

    Recovery means that there are as many replicas as before, and :data:`BACK` of the rate ``before`` is reached twice
    in a row.
    """
    seconds = max(2.0, 2 * before.p99 / 1000)
    requests = photographs(server, model)
    running = replicas(server)
    running[0].kill()
    killed = time.monotonic()
    since = math.inf
    while time.monotonic() - killed < BACK_SECONDS:
        started = time.monotonic() - killed
        # Skip the first moments of a load, in which no response arrives.
        rate = load.run(server.port, requests, 32, seconds, warm=before.p99 / 1000, wrk=False).rate
        if rate < BACK * before.rate or len(replicas(server)) < len(running):
            since = math.inf
        elif since < math.inf:
            return since
        else:
            since = started
    return math.inf


def replicas(server: Server) -> list[psutil.Process]:
    found = []
    for process in server.process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("ServeReplica" in part for part in process.cmdline()):
                found.append(process)
    return found


def features(model: str) -> str:
    return f"/v1/models/{model}/features?weights=random&nodes={NODES}"


def photographs(server: Server, model: str) -> list[bytes]:
    accept = "application/x-safetensors"
    return [load.http(server.port, features(model), file, "image/jpeg", accept) for file in photos.jpegs()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mobilenet_v3_small")
    parser.add_argument("--seconds", type=float, default=5.0, help="that a load lasts")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for model in options.models.split(","):
        preload = f"{model}@random:{NODES}"
        setups = {
            ALONE: lambda preload=preload: fxserve(preload=preload),
            "2 replicas, HAProxy": lambda model=model: ray_serve(model, True),
            "2 replicas, Python proxy": lambda model=model: ray_serve(model, False),
        }
        found: dict[str, list[dict[int, load.Load]]] = {setup: [] for setup in setups}
        back: dict[str, list[float]] = {setup: [] for setup in setups}
        for _ in range(options.turns):
            for setup, start in setups.items():
                with start() as server:
                    loads = measured(server, model, options.seconds)
                    found[setup].append(loads)
                    if setup != ALONE:
                        back[setup].append(recovery(server, model, loads[32]))
                say(f"{model}, {setup}: {', '.join(f'{c}: {shown(one)}' for c, one in loads.items())}, {back[setup]}")
        alone: list[float] = []
        for setup, turns in found.items():
            rate = statistics.median(turn[32].rate for turn in turns)
            p50 = statistics.median(turn[1].p50 for turn in turns)
            alone = alone or [rate, p50]
            ratios = (f"{rate / alone[0]:.2f}", f"{p50 / alone[1]:.2f}")
            after = f"{statistics.median(back[setup]):.0f}" if back[setup] else ""
            rows.append((model, setup, f"{rate:.0f}", ratios[0], f"{p50:.1f}", ratios[1], after))
    print(f"# Two replicas on Ray Serve beside one process\n\n{date.today()}, {machine()}, ", end="")
    print(f"torch {version('torch')}, Ray {version('ray')}. {WHAT}\n")
    head = ("model", "", "images/s, 32 connections", "ratio", "p50 ms, 1 connection", "ratio", "s to rate after kill")
    print(*table(head, rows), sep="\n")


if __name__ == "__main__":
    main()
