"""Compare fxserve with its peers and with the upper bound of the cores: one table with ratios.

    python benchmarks/serve.py                                     # every case but memory, some twenty minutes
    python benchmarks/serve.py --cases mobilenet-32 --seconds 3    # one case, a minute or two
    python benchmarks/serve.py --cases memory                      # 6,000 requests

All serve torchvision's architectures with random weights on 127.0.0.1: the same JPEG files in, the same two feature
maps out as safetensors. Servers are measured one after another; only one runs at a time, with the load generator.
Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import io
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import load
import numpy as np
import photos
import servers
from load import Load
from servers import Server

from service.machine import available_cores, processor

SAFETENSORS = "application/x-safetensors"
NODES = {
    "mobilenet_v3_small": "features.8:C4,features.12:C5",
    "resnet50": "layer3:C4,layer4:C5",
    "vit_b_16": "encoder.layers.encoder_layer_5:half,encoder.ln:tokens",
    "swin_t": "features.5:C4,features.7:C5",
    "timm.vit_small_patch14_dinov2": "blocks.5:half,norm:tokens",
}
# Path and encoding of each peer's requests, following its documentation.
PEERS = {
    "plain_fastapi": ("/predict", "multipart"),
    "litserve_api": ("/predict", "multipart"),
    "mosec_workers": ("/inference", "raw"),
    "ray_serve": ("/predict", "raw"),
}


@dataclass(frozen=True)
class Case:
    """A load, measured on fxserve, on the peers and in-process.

    Attributes:
        images: images per request; peers are measured only with one.
        width: width of the photographs in pixels; peers are measured only with 500.
        latency: compare p50 instead of the rate.
        longer: factor of the duration, for slow requests.
        of_peer: required ratio to the peers, which use bfloat16 (autocast) whenever fxserve does.
        of_float32: required ratio to fxserve itself in float32, which is measured in the same case.
        of_ceiling: required ratio to the in-process measurement; None to skip that measurement.
    """

    name: str
    model: str
    connections: int
    images: int = 1
    width: int = 500
    precision: str = "float32"
    query: str = ""
    latency: bool = False
    longer: int = 1
    of_peer: float | None = None
    of_float32: float | None = None
    of_ceiling: float | None = None

    def spec(self, backend: str) -> dict[str, Any]:
        nodes = dict(pair.split(":") for pair in NODES[self.model].split(","))
        return {
            "model": self.model,
            "weights": "random",
            "return_nodes": nodes,
            "precision": self.precision,
            "backend": "openvino" if self.precision == "int8" else backend,
        }

    @property
    def peer_precision(self) -> str:
        """The precision of the peers, which have no int8."""
        return "bfloat16" if self.precision == "bfloat16" else "float32"

    @property
    def by_peers(self) -> bool:
        """Whether peers are measured; they serve only torchvision's models."""
        return self.images == 1 and self.width == 500 and not self.model.startswith("timm.")


CASES = (
    Case("mobilenet-32", "mobilenet_v3_small", 32, of_peer=4.0, of_ceiling=0.85),
    Case("mobilenet-8", "mobilenet_v3_small", 8),
    Case("mobilenet-1", "mobilenet_v3_small", 1, latency=True, of_peer=0.2, of_ceiling=1.35),
    Case("mobilenet-large-8", "mobilenet_v3_small", 8, width=2000),
    Case("mobilenet-large-fast-8", "mobilenet_v3_small", 8, width=2000, query="?preprocess=fast"),
    Case("resnet50-8", "resnet50", 8, of_peer=2.2, of_ceiling=0.9),
    Case("resnet50-int8-8", "resnet50", 8, precision="int8", of_peer=6.0),
    Case("vit-8", "vit_b_16", 8, longer=4, of_peer=1.5),
    Case("swin-8", "swin_t", 8, longer=2, of_peer=1.5),
    Case("resnet50-bfloat16-8", "resnet50", 8, precision="bfloat16", of_peer=1.3, of_float32=1.8),
    Case("vit-bfloat16-8", "vit_b_16", 8, precision="bfloat16", longer=2, of_peer=1.3, of_float32=1.8),
    Case("swin-bfloat16-8", "swin_t", 8, precision="bfloat16", longer=2, of_peer=1.3, of_float32=1.8),
    Case("dinov2-bfloat16-4", "timm.vit_small_patch14_dinov2", 4, precision="bfloat16", longer=3, of_float32=1.8),
    Case("resnet50-multipart-32", "resnet50", 1, images=32, query="?pool=avg", longer=4, of_ceiling=0.9),
)
_TURNS = 5
_LATENCY_PARTS = 4
"""Number of parts that each turn is split into when latencies are compared."""
_PROTOCOL_CONNECTIONS = (1, 32)
PROTOCOL_BAR = 0.9
"""Required ratio to the rate of ``/v1``."""
NODE_LIST_BAR = 1500
NOTHING_BAR = 2500
MEMORY_BAR = 1.6e9


class Benchmark:
    """The runner of the cases; it caches the peers' results, which several cases share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.files = photos.jpegs()
        self.rows: list[tuple[str, ...]] = []
        self._peers: dict[tuple[str, str, str, int], Load] = {}

    def case(self, case: Case) -> None:
        if case.of_float32 is not None:
            return self.narrow(case)
        # Alternate, since the machine's speed varies over time. For latencies, turns are short and close together; for
        # rates they are longer, since requests in flight at the end of a turn are not counted.
        parts = _LATENCY_PARTS if case.latency else 1
        spec, seconds, settle = case.spec(self.options.backend), self.options.seconds / parts, self.options.settle
        most = servers.ceiling(spec, seconds / 2, settle, pooled="pool" in case.query, latency=case.latency)
        with servers.fxserve() as server, nullcontext() if case.of_ceiling is None else most as ceiling:
            path, backend = extractor(server, spec, settle)
            turns = [
                (self._load(server, path + case.query, case, seconds), ceiling.measure() if ceiling else 0.0)
                for _ in range(_TURNS * parts)
            ]
        result = sorted((mine for mine, _ in turns), key=lambda mine: mine.rate)[len(turns) // 2]
        say(f"{case.name}: fxserve ({backend}) {shown(result, case.images)}")
        self._row(case, f"fxserve, {backend}", result, result)
        self._of_peers(case, result)
        if ceiling is None:
            return
        rate = statistics.median(most for _, most in turns)
        say(f"{case.name}: in-process ({ceiling.backend}) {rate:.1f}/s, {ceiling.how}")
        if case.latency:
            ratio = statistics.median(mine.p50 * most / 1000 for mine, most in turns)
        else:
            ratio = statistics.median(mine.rate * case.images / most for mine, most in turns)
        bar = f"{'≤' if case.latency else '≥'} {case.of_ceiling}"
        p50 = f"{1000 / rate:.1f}" if case.latency else ""
        who = f"in-process, {ceiling.backend}"
        self.rows.append((case.name, who, f"{rate:.1f}", p50, "", f"{ratio:.2f}", bar))

    def narrow(self, case: Case) -> None:
        """Compare a precision with float32, alternately on the same server."""
        wide, settle = replace(case, precision="float32"), self.options.settle
        with servers.fxserve() as server:
            ways = [(one, *extractor(server, one.spec(self.options.backend), settle)) for one in (case, wide)]
            turns = [
                [self._load(server, path, one, self.options.seconds / 2) for one, path, _ in ways]
                for _ in range(_TURNS)
            ]
        results = [sorted(own, key=lambda one: one.rate)[_TURNS // 2] for own in zip(*turns, strict=True)]
        ratio = statistics.median(mine.rate / exact.rate for mine, exact in turns)
        for (one, _, backend), found in zip(ways, results, strict=True):
            say(f"{case.name}: fxserve ({backend}, {one.precision}) {shown(found)}")
            ratio_and_bar = ("", "") if one is case else (f"{ratio:.2f}", f"≥ {case.of_float32}")
            self.rows.append((case.name, f"fxserve {one.precision}, {backend}", *figures(found, 1), *ratio_and_bar))
        self._of_peers(case, results[0])

    def _of_peers(self, case: Case, mine: Load) -> None:
        for peer in self.options.peers if case.by_peers else ():
            if (found := self._peer(peer, case)) is not None:
                self._row(case, peer, found, mine)

    def protocol(self) -> None:
        """Compare ``/v2`` with ``/v1``, with the same images and the same outputs as raw tensors."""
        spec = next(case for case in CASES if case.name == "mobilenet-32").spec(self.options.backend)
        with servers.fxserve() as server:
            path, backend = extractor(server, spec, self.options.settle)
            infer = path.replace("/v1/extractors/", "/v2/models/").replace("/features", "/infer")
            keys = list(spec["return_nodes"].values())
            ways = {
                "/v1": self._requests(server, path),
                "/v2": [load.infer(server.port, infer, data, keys) for data in self.files],
            }
            self._in_turns("v2", server, ways, backend, PROTOCOL_BAR)

    def embeddings(self) -> None:
        """Compare ``/v1/embeddings`` with ``/features``, with the same images and the same vectors."""
        spec = next(case for case in CASES if case.name == "mobilenet-32").spec(self.options.backend)
        spec |= {"return_nodes": {"features.12": "C5"}}
        with servers.fxserve() as server:
            path, backend = extractor(server, spec, self.options.settle)
            name = path.split("/")[3]
            ways = {
                "/features": self._requests(server, f"{path}?pool=avg"),
                "/embeddings": [load.embeddings(server.port, name, data) for data in self.files],
            }
            self._in_turns("embeddings", server, ways, backend, PROTOCOL_BAR)

    def _in_turns(self, name: str, server: Server, ways: dict[str, list[bytes]], backend: str, bar: float) -> None:
        """Compare two kinds of requests to one server; the ratio is the second's rate to the first's."""
        for connections in _PROTOCOL_CONNECTIONS:
            seconds, warm, wrk = self.options.seconds, self.options.warm, self.options.wrk
            turns = [
                [load.run(server.port, requests, connections, seconds, warm, wrk=wrk) for requests in ways.values()]
                for _ in range(_TURNS)
            ]
            ratio = statistics.median(second.rate / first.rate for first, second in turns)
            for place, (way, results) in enumerate(zip(ways, zip(*turns, strict=True), strict=True)):
                found = sorted(results, key=lambda result: result.rate)[_TURNS // 2]
                say(f"{name}-{connections}: {way} ({backend}) {shown(found)}")
                ratio_and_bar = (f"{ratio:.2f}", f"≥ {bar}") if place else ("", "")
                self.rows.append(
                    (f"{name}-{connections}", f"fxserve {way}, {backend}", *figures(found, 1), *ratio_and_bar)
                )

    def node_list(self) -> None:
        with servers.fxserve() as server:
            path = "/v1/models/resnet50/nodes"
            server.wait("GET", path)
            result = load.run(
                server.port, [load.http(server.port, path)], 32, self.options.seconds, wrk=self.options.wrk
            )
        say(f"nodes: {shown(result)}")
        rate, p50, p99 = figures(result, 1)
        self.rows.append(("nodes, warm", "fxserve", rate, p50, p99, "", f"≥ {NODE_LIST_BAR}/s"))

    def nothing(self) -> None:
        """Measure a request's overhead without decoding and computing: the pooled input node of a small tensor."""
        values = io.BytesIO()
        np.save(values, np.zeros((1, 3, 32, 32), np.float32))
        spec = {"model": "squeezenet1_1", "weights": "random", "return_nodes": ["x"], "backend": "eager"}
        seconds, warm, wrk = self.options.seconds, self.options.warm, self.options.wrk
        with servers.fxserve() as server:
            path, _ = extractor(server, spec, 0)
            requests = [load.http(server.port, f"{path}?pool=avg", values.getvalue(), "application/x-npy", SAFETENSORS)]
            for connections in _PROTOCOL_CONNECTIONS:
                found = load.run(server.port, requests, connections, seconds, warm, wrk=wrk)
                say(f"nothing-{connections}: {shown(found)}")
                bar = f"≥ {NOTHING_BAR}/s" if connections > 1 else ""
                self.rows.append((f"nothing-{connections}", "fxserve", *figures(found, 1), "", bar))

    def memory(self) -> None:
        case = next(case for case in CASES if case.name == "resnet50-8")
        sizes = []
        with servers.fxserve() as server:
            path, backend = extractor(server, case.spec(self.options.backend), self.options.settle)
            requests = self._requests(server, path)
            for count in (1000, 5000):
                done = 0
                while done < count:
                    done += load.run(server.port, requests, 8, 10, warm=0.0, wrk=False).requests
                sizes.append(server.memory())
                say(f"memory: {sizes[-1] / 1e9:.2f} GB resident after {count} requests more")
        shares = f"{sizes[0] / 1e9:.2f} GB, then {sizes[1] / 1e9:.2f} GB"
        self.rows.append(("memory", f"fxserve, {backend}", "", "", "", shares, f"< {MEMORY_BAR / 1e9} GB, level"))

    def _load(self, server: Server, path: str, case: Case, seconds: float) -> Load:
        if case.images > 1:
            files = [self.files[i % len(self.files)] for i in range(case.images)]
            body, kind = photos.multipart(files)
            requests = [load.http(server.port, path, body, kind, SAFETENSORS)]
        else:
            requests = self._requests(server, path, case.width)
        seconds *= case.longer
        return load.run(server.port, requests, case.connections, seconds, self.options.warm, wrk=self.options.wrk)

    def _requests(self, server: Server, path: str, width: int = 500) -> list[bytes]:
        files = photos.jpegs(width, 3 * width // 4)
        return [load.http(server.port, path, data, "image/jpeg", SAFETENSORS) for data in files]

    def _peer(self, name: str, case: Case) -> Load | None:
        precision = case.peer_precision
        key = (name, case.model, precision, case.connections)
        if key not in self._peers:
            path, how = PEERS[name]
            bodies = [photos.multipart([d]) if how == "multipart" else (d, "image/jpeg") for d in self.files]
            try:
                with servers.peer(name, case.model, NODES[case.model], precision) as server:
                    server.wait("POST", path, content=bodies[0][0], headers={"content-type": bodies[0][1]})
                    requests = [load.http(server.port, path, body, kind) for body, kind in bodies]
                    for connections in self._connections(case):
                        self._peers[name, case.model, precision, connections] = load.run(
                            server.port,
                            requests,
                            connections,
                            self.options.seconds * case.longer,
                            self.options.warm,
                            wrk=self.options.wrk,
                        )
            except RuntimeError as error:
                say(f"{name} is left out: {error}")
                return None
        say(f"{case.name}: {name} {shown(self._peers[key])}")
        return self._peers[key]

    def _connections(self, case: Case) -> set[int]:
        """Return the numbers of connections of all requested cases that share a peer measurement with ``case``."""
        asked = (other for other in CASES if other.name in self.options.cases and other.by_peers)
        return {
            other.connections
            for other in asked
            if (other.model, other.peer_precision) == (case.model, case.peer_precision)
        }

    def _row(self, case: Case, who: str, found: Load, mine: Load) -> None:
        rate, p50, p99 = figures(found, case.images)
        if found is mine:
            ratio = bar = ""
        else:
            of = mine.p50 / found.p50 if case.latency else mine.rate / max(found.rate, 1e-9)
            ratio = f"{of:.2f}"
            bar = "" if case.of_peer is None else f"{'≤' if case.latency else '≥'} {case.of_peer}"
        self.rows.append((case.name, who, rate, p50, p99, ratio, bar))


def extractor(server: Server, spec: dict[str, Any], settle: float) -> tuple[str, str]:
    """Create an extractor; return the path of its features, and its backend after at most ``settle`` seconds."""
    made = server.http.post("/v1/extractors?wait=300", json=spec)
    if made.status_code not in (200, 201) or made.json()["state"] != "ready":
        raise SystemExit(f"fxserve cannot build {spec}: {made.text}")
    path = f"/v1/extractors/{made.json()['id']}"
    # Only extractors in use are lowered.
    server.http.post(f"{path}/features", content=photos.jpegs()[0], headers={"content-type": "image/jpeg"})
    deadline = time.monotonic() + settle
    backend = made.json()["backend"]
    while spec["backend"] == "auto" and backend == "eager" and time.monotonic() < deadline:
        time.sleep(0.2)
        backend = server.http.get(path).json()["backend"]
    return f"{path}/features", backend


def figures(found: Load, images: int) -> tuple[str, str, str]:
    return f"{found.rate * images:.1f}", f"{found.p50:.1f}", f"{found.p99:.1f}"


def shown(found: Load, images: int = 1) -> str:
    rate, p50, p99 = figures(found, images)
    others = {status: count for status, count in found.statuses.items() if status != "200"}
    return f"{rate}/s, p50 {p50} ms, p99 {p99} ms{f', {others}' if others else ''}"


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def machine() -> str:
    return f"{available_cores()} cores, {processor() or platform.machine()}, Python {platform.python_version()}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Render a Markdown table, line by line."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, tuple("-" * width for width in widths), *rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def main() -> None:
    names = [case.name for case in CASES] + ["v2", "embeddings", "nodes", "nothing", "memory"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(names[:-1]), help=f"of {', '.join(names)}")
    parser.add_argument("--peers", default=",".join(PEERS), help="peers to measure; '' for none")
    parser.add_argument("--backend", default="auto", help="backend of fxserve for float32")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="duration of a measurement; a quarter of it for latencies"
    )
    parser.add_argument("--warm", type=float, default=3.0, help="seconds of warm-up")
    parser.add_argument("--settle", type=float, default=90.0, help="seconds to wait for backend=auto to lower")
    parser.add_argument(
        "--no-wrk", dest="wrk", action="store_false", help="use our own load generator even if wrk is installed"
    )
    options = parser.parse_args()
    options.cases = options.cases.split(",")
    options.peers = [name for name in options.peers.split(",") if name]
    if wrong := [name for name in options.cases if name not in names] + [p for p in options.peers if p not in PEERS]:
        parser.error(f"there is no {', '.join(wrong)}")
    benchmark = Benchmark(options)
    try:
        for name in options.cases:
            if name == "v2":
                benchmark.protocol()
            elif name == "embeddings":
                benchmark.embeddings()
            elif name == "nodes":
                benchmark.node_list()
            elif name == "nothing":
                benchmark.nothing()
            elif name == "memory":
                benchmark.memory()
            else:
                benchmark.case(next(case for case in CASES if case.name == name))
    finally:  # also print results measured before a failure
        print(f"{machine()}. Images/s; milliseconds. The ratio is that of fxserve to the row's server.\n")
        print("\n".join(table(("case", "server", "images/s", "p50", "p99", "ratio", "bar"), benchmark.rows)))


if __name__ == "__main__":
    main()
