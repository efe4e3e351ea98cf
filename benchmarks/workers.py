"""Compare two server processes with one on the same cores: images/s, latency and memory.

    python benchmarks/workers.py
    python benchmarks/workers.py --models resnet50 --turns 5 --workers 4

The servers run alternately, one at a time, and are measured once every process has switched to OpenVINO. Memory is the
sum of the processes' proportional set sizes (PSS), in which a page mapped by several processes counts once. Needs the
extras ``openvino`` and ``bench``.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import NamedTuple

import httpx
import load
import photos
import psutil
import servers
from serve import CASES, SAFETENSORS, Case, extractor, machine, say, table
from servers import Server

ASKED = 12
"""Number of separate connections that query the backend: enough to reach every process."""

LOWERING_SECONDS = 300


class Measured(NamedTuple):
    """The results of one turn of one server.

    Attributes:
        rate: images/s over many connections.
        p50, p99: latency in milliseconds over many connections.
        alone: median latency in milliseconds over one connection.
        memory: proportional set size in bytes.
    """

    rate: float
    p50: float
    p99: float
    alone: float
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mobilenet_v3_small,resnet50,vit_b_16")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    print(machine(), flush=True)
    rows = []
    for model in options.models.split(","):
        case = next(case for case in CASES if case.model == model)
        turns = [
            [measure(case, workers, options.seconds) for workers in (1, options.workers)] for _ in range(options.turns)
        ]
        say(f"{model}: {turns}")
        one, several = (Measured(*map(median, zip(*of_one, strict=True))) for of_one in zip(*turns, strict=True))
        for workers, found in ((1, one), (options.workers, several)):
            values = [f"{found.rate:.1f}", f"{found.p50:.0f}", f"{found.p99:.0f}", f"{found.alone:.1f}"]
            ratios = [f"{found.rate / one.rate:.2f}", f"{found.memory / one.memory:.2f}"]
            rows.append((model, str(case.connections), str(workers), *values, f"{found.memory / 1e6:.0f}", *ratios))
    heads = ("model", "connections", "processes", "images/s", "p50 ms", "p99 ms", "p50 ms of one connection")
    print(*table((*heads, "memory MB", "rate ratio", "memory ratio"), rows), sep="\n")


def measure(case: Case, workers: int, seconds: float) -> Measured:
    """Start a server, and measure it once its model is lowered."""
    with servers.fxserve(workers=workers) as server:
        path, _ = extractor(server, case.spec("auto"), settle=0)
        requests = [load.http(server.port, path, image, "image/jpeg", SAFETENSORS) for image in photos.jpegs()]
        for _ in range(int(LOWERING_SECONDS / 8)):
            load.run(server.port, requests, case.connections, 8)
            if backends(server, path.removesuffix("/features")) == {"openvino"}:
                break
        many = load.run(server.port, requests, case.connections, seconds)
        one = load.run(server.port, requests, 1, seconds)
        return Measured(many.rate, many.p50, many.p99, one.p50, memory(server))


def backends(server: Server, path: str) -> set[str]:
    """Return the backends of all processes."""
    url = f"http://127.0.0.1:{server.port}{path}"
    return {httpx.get(url, timeout=60).json()["backend"] for _ in range(ASKED)}


def memory(server: Server) -> int:
    """Return the proportional set size of the server's processes in bytes."""
    family: list[psutil.Process] = [server.process, *server.process.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in family)


if __name__ == "__main__":
    main()
