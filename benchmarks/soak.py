"""Soak test: a long mixed load on a real server, checked for growth of memory, threads, files, children and tasks.

    python benchmarks/soak.py                    half an hour
    python benchmarks/soak.py --seconds 120      the short form

Clients use many extractors over many models, with photographs of many sizes, bad images, wrong names and truncated
bodies, and some disconnect early. One pinned extractor is used throughout. The test fails (exit status 1) if

- a response is unexpected, or the pinned extractor's values change;
- the pinned extractor is evicted, or weights and extractors exceed the budget with nothing in flight;
- resident memory, threads, files, children or unfinished tasks grow between the second and the last fifth of the time.

If the machine is suspended for over five seconds, that time does not count, and requests in flight may time out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import PIL.Image
import safetensors.numpy
import servers
import skimage.data
from rich.console import Console

MiB = 1024**2

# Forty small and medium models of all families; their weights exceed the budget below.
# fmt: off
MODELS = (
    "alexnet", "convnext_tiny", "densenet121", "densenet169", "densenet201", "efficientnet_b0", "efficientnet_b1",
    "efficientnet_b2", "efficientnet_b3", "googlenet", "inception_v3", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0",
    "mnasnet1_3", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_1_6gf", "regnet_x_400mf",
    "regnet_x_800mf", "regnet_y_1_6gf", "regnet_y_400mf", "regnet_y_800mf", "resnet18", "resnet34", "resnet50",
    "resnext50_32x4d", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0",
    "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "lraspp_mobilenet_v3_large",
    "deeplabv3_mobilenet_v3_large", "maxvit_t", "efficientnet_v2_s",
)
# fmt: on
EXTRACTORS = 300
BUDGET = 512 * MiB
SUSPENDED_SECONDS = 5.0
"""Duration of a one-second sleep from which the machine counts as suspended."""

PINNED = "mobilenet_v3_small@random:features.8"
PINNED_PATH = "/v1/models/mobilenet_v3_small/features?weights=random&nodes=features.8&pool=avg"

FEW_MODELS = ("squeezenet1_1", "squeezenet1_0", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "resnet18")


@dataclass
class Sample:
    """Resources that the server holds, with ``memory`` and ``kept`` in bytes."""

    memory: float
    kept: float
    threads: int
    files: int
    children: int
    tasks: int
    inflight: float

    def __str__(self) -> str:
        return (
            f"{self.memory / MiB:6.0f} MiB resident, {self.kept / MiB:5.0f} MiB kept, {self.threads:3} threads, "
            f"{self.files:3} files, {self.children} children, {self.tasks:3} tasks, {self.inflight:3.0f} in flight"
        )


@dataclass
class Outcome:
    """Results of the clients and the sampling."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    stood_still: float = 0.0

    def note(self, answer: httpx.Response, allowed: Sequence[str], what: str, stood_still: float) -> None:
        """Count a response; ``stood_still`` is the suspended time at its request."""
        status = str(answer.status_code)
        self.statuses[status] += 1
        late = ("503", "504") if self.stood_still > stood_still else ()
        if status not in (*allowed, "429", *late):
            self.wrong.append(f"{what}: {status} {answer.text[:200]}")


class Soak:
    """The clients of one run.

    Args:
        server: the server.
        models: the models to use.
        extractors: number of different extractors.
    """

    def __init__(self, server: servers.Server, models: Sequence[str], extractors: int) -> None:
        self.server = server
        self.outcome = Outcome()
        self.ending = threading.Event()
        self.specs = self._specs(models, extractors)
        self.photos = _photos()
        self.pinned = self._ask(server.http, PINNED_PATH, self.photos[0]).content
        [extractor] = server.http.get("/v1/extractors").json()["extractors"]
        self.pinned_id: str = extractor["id"]

    def run(self, seconds: float, clients: int) -> Outcome:
        """Run ``clients`` clients for ``seconds`` and sample the server."""
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        passed = 0.0
        while passed < seconds:
            passed += self._wait(min(seconds / 60, seconds - passed))
            self.outcome.samples.append(self.sample())
            print(self.outcome.samples[-1], flush=True)
        self.ending.set()
        for thread in threads:
            thread.join()
        return self.outcome

    def _wait(self, seconds: float) -> float:
        """Sleep, not counting time in which the machine is suspended, and return the seconds slept."""
        passed = 0.0
        while passed < seconds:
            began = time.monotonic()
            time.sleep(min(1.0, seconds - passed))
            slept = time.monotonic() - began
            if slept > SUSPENDED_SECONDS:
                self.outcome.stood_still += slept
            else:
                passed += slept
        return passed

    def sample(self) -> Sample:
        process, metrics = self.server.process, self.server.http.get("/metrics").text
        found = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        if self.server.http.get(f"/v2/models/{self.pinned_id}/ready").status_code != 200:
            self.outcome.wrong.append("the pinned extractor was evicted")
        return Sample(
            process.memory_info().rss,
            float(found["fxserve_memory_bytes"]),
            process.num_threads(),
            process.num_fds(),
            len(process.children(recursive=True)),
            int(float(found["fxserve_tasks"])),
            float(found["fxserve_inflight_requests"]),
        )

    def _specs(self, models: Sequence[str], extractors: int) -> list[str]:
        """Build paths of the one-step route with different nodes of all models."""
        nodes = {}
        for model in models:
            listed = self.server.http.get(f"/v1/models/{model}/graph").json()["nodes"]
            nodes[model] = [n["name"] for n in listed if n["extractable"] and n["op"] != "placeholder"]
        chosen = random.Random(0)
        specs = []
        for number in range(extractors):
            model = models[number % len(models)]
            node = chosen.choice(nodes[model])
            specs.append(f"/v1/models/{model}/features?weights=random&nodes={node}:n{number}&dtype=float16")
        return specs

    def _client(self, number: int) -> None:
        chosen = random.Random(number)
        with httpx.Client(base_url=self.server.http.base_url, timeout=180, verify=False) as client:
            while not self.ending.is_set():
                try:
                    self._act(client, chosen)
                except Exception as error:
                    self.outcome.wrong.append(f"{type(error).__name__}: {error}")

    def _act(self, client: httpx.Client, chosen: random.Random) -> None:
        spec, photo, still = chosen.choice(self.specs), chosen.choice(self.photos), self.outcome.stood_still

        def note(answer: httpx.Response, allowed: Sequence[str], what: str) -> None:
            self.outcome.note(answer, allowed, what, still)

        kinds = ("spec", "pinned", "bad", "unknown", "left", "broken", "deadline")
        match chosen.choices(kinds, (8, 4, 2, 1, 2, 1, 1))[0]:
            case "spec":
                note(self._ask(client, spec, photo), ("200",), spec)
            case "pinned":
                answer = self._ask(client, PINNED_PATH, self.photos[0])
                note(answer, ("200",), "pinned")
                if answer.status_code == 200 and not _same(answer.content, self.pinned):
                    self.outcome.wrong.append("the pinned extractor's values changed")
            case "bad":
                note(self._ask(client, PINNED_PATH, photo[: len(photo) // 3]), ("422",), "bad image")
            case "unknown":
                path = f"/v1/models/resnet18/features?weights=random&nodes=no-{chosen.random()}"
                note(self._ask(client, path, photo), ("422",), "unknown node")
            case "left":
                self._leave(PINNED_PATH, photo, len(photo))
            case "broken":
                self._leave(spec, photo, len(photo) // 2)
            case "deadline":
                note(self._ask(client, spec, photo, timeout="0.02"), ("200", "504"), "deadline")

    def _ask(self, client: httpx.Client, path: str, photo: bytes, timeout: str = "120") -> httpx.Response:
        headers = {
            "content-type": "image/jpeg",
            "accept": "application/x-safetensors",
            "x-request-timeout": timeout,
        }
        return client.post(path, content=photo, headers=headers)

    def _leave(self, path: str, photo: bytes, sent: int) -> None:
        """Send all or part of a request and disconnect."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {len(photo)}\r\n\r\n"
        self.outcome.statuses["left"] += 1
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.server.port)) as connection:
            connection.sendall(head.encode() + photo[:sent])


def _photos() -> list[bytes]:
    """Encode photographs 48 to 1,500 pixels wide as JPEG."""
    photos = []
    for name, sides in (("chelsea", (224, 48, 640)), ("coffee", (320, 1500)), ("rocket", (97, 500))):
        for side in sides:
            image = PIL.Image.fromarray(getattr(skimage.data, name)()).resize((side, side * 3 // 4))
            file = io.BytesIO()
            image.save(file, "JPEG", quality=85)
            photos.append(file.getvalue())
    return photos


def _same(one: bytes, other: bytes) -> bool:
    """Return whether two responses have equal values, up to rounding caused by batching."""
    a, b = safetensors.numpy.load(one), safetensors.numpy.load(other)
    return a.keys() == b.keys() and all(abs(a[key] - b[key]).max() < 1e-4 * abs(b[key]).max() for key in a)


def judge(outcome: Outcome, settled: Sample, budget: int) -> list[str]:
    """List the problems with responses, the settled state and growth."""
    wrong = [f"{count} x {what}" for what, count in Counter(outcome.wrong).most_common(20)]
    if settled.inflight:
        wrong.append(f"{settled.inflight:.0f} requests are still in flight")
    if settled.kept > budget:
        wrong.append(f"{settled.kept / MiB:.0f} MiB are kept, over the budget of {budget / MiB:.0f}")
    fifth = max(1, len(outcome.samples) // 5)
    early, late = outcome.samples[fifth : 2 * fifth], outcome.samples[-fifth:]
    for what, slack in (("memory", 64 * MiB), ("threads", 4), ("files", 8), ("children", 0), ("tasks", 16)):
        before = statistics.median(getattr(sample, what) for sample in early)
        after = statistics.median(getattr(sample, what) for sample in late)
        allowed = before * (1.1 if what == "memory" else 1) + slack
        if after > allowed:
            wrong.append(f"{what} grew from {before:,.0f} to {after:,.0f}, over {allowed:,.0f}")
    return wrong


def main(seconds: float, clients: int, models: Sequence[str], extractors: int, budget: int) -> int:
    """Run the test, print the results, and return the exit status."""
    console = Console()
    with servers.fxserve(memory_budget=budget, preload=PINNED, lowering=False) as server:
        soak = Soak(server, models, extractors)
        outcome = soak.run(seconds, clients)
        time.sleep(3)
        deadline = time.monotonic() + 60
        while (settled := soak.sample()).inflight and time.monotonic() < deadline:
            time.sleep(1)
        outcome.samples.append(settled)
        print(settled)
        console.print(dict(outcome.statuses), f"stood still for {outcome.stood_still:.0f} s")
        evicted = [line for line in server.http.get("/metrics").text.splitlines() if "evictions_total{" in line]
        console.print("\n".join(evicted), markup=False)
        wrong = judge(outcome, settled, budget)
    for line in wrong:
        console.print(line, style="red", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="six small models and 24 extractors, as in the test suite")
    given = parser.parse_args()
    chosen = (FEW_MODELS, 24, 64 * MiB) if given.small else (MODELS, EXTRACTORS, BUDGET)
    sys.exit(main(given.seconds, given.clients, *chosen))
