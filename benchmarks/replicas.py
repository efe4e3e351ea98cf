"""Two replicas of a core each on Ray Serve, beside one process with two cores, on one machine.

pip install -e '.[openvino,bench,ray]'
python benchmarks/replicas.py > benchmarks/results/replicas-2-cores.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version

import load
import photos
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

NODES = "C4,C5"
CONNECTIONS = (32, 1)
SETTLE_SECONDS = 40.0


@contextlib.contextmanager
def ray_serve(model: str, haproxy: bool) -> Iterator[Server]:
    """Two nodes of a core, a replica on each."""
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
    """Wait until every process has replaced eager, which it does for extractors in use."""
    seen = 0
    deadline = time.monotonic() + SETTLE_SECONDS
    while seen < 12 and time.monotonic() < deadline:  # answers of either replica
        server.http.post(path, content=photos.jpegs()[0], headers={"content-type": "image/jpeg"})
        [extractor] = server.http.get("/v1/extractors").json()["extractors"]
        seen = 0 if extractor["backend"] == "eager" else seen + 1
        time.sleep(0.5)


def measured(server: Server, model: str, seconds: float) -> dict[int, load.Load]:
    """By connections."""
    path = f"/v1/models/{model}/features?weights=random&nodes={NODES}"
    accept = "application/x-safetensors"
    requests = [load.http(server.port, path, file, "image/jpeg", accept) for file in photos.jpegs()]
    lowered(server, path)
    return {
        connections: load.run(server.port, requests, connections, seconds, warm=2.0, wrk=False)
        for connections in CONNECTIONS
    }


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
            "one process, 2 cores": lambda preload=preload: fxserve(preload=preload),
            "2 replicas, HAProxy": lambda model=model: ray_serve(model, True),
            "2 replicas, Python proxy": lambda model=model: ray_serve(model, False),
        }
        found: dict[str, list[dict[int, load.Load]]] = {setup: [] for setup in setups}
        for _ in range(options.turns):
            for setup, start in setups.items():
                with start() as server:
                    found[setup].append(measured(server, model, options.seconds))
                say(f"{model}, {setup}: {', '.join(f'{c}: {shown(one)}' for c, one in found[setup][-1].items())}")
        alone: list[float] = []
        for setup, turns in found.items():
            rate = statistics.median(turn[32].rate for turn in turns)
            p50 = statistics.median(turn[1].p50 for turn in turns)
            alone = alone or [rate, p50]
            rows.append((model, setup, f"{rate:.0f}", f"{rate / alone[0]:.2f}", f"{p50:.1f}", f"{p50 / alone[1]:.2f}"))
    print(f"# Two replicas on Ray Serve beside one process\n\n{date.today()}, {machine()}, ", end="")
    print(f"torch {version('torch')}, Ray {version('ray')}. {WHAT}\n")
    head = ("model", "", "images/s, 32 connections", "ratio", "p50 ms, 1 connection", "ratio")
    print(*table(head, rows), sep="\n")


if __name__ == "__main__":
    main()
