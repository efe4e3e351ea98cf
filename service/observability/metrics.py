"""Counts and times for Prometheus. One registry a service, so that two in one process do not mix.

With several server processes, whichever is asked answers for all: ``PROMETHEUS_MULTIPROC_DIR`` names the folder that
they share (prometheus_client's multiprocess mode), counters and histograms are summed over it and so are the gauges of
the processes that live. The ``process_*`` metrics are of one process and are left out then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from starlette.types import Scope

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SHARED_DIR = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder shared by several processes; prometheus_client reads it when it is imported."""

# From a cached list of nodes to a cold model.
_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

STAGES = ("decode", "queue", "compute", "encode")

STAGES_TAKEN = "fxserve.stages"
"""Where the scope of a request with features says how many milliseconds each took."""


class Metrics:
    """Everything that is counted. Counters and histograms may be used from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.shared_dir = os.environ.get(SHARED_DIR)
        if self.shared_dir is None:
            ProcessCollector(registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"fxserve_{name}", text, labels, registry=registry, multiprocess_mode="livesum")

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"fxserve_{name}", text, labels, registry=registry)

        def seconds(stage: str, text: str) -> Histogram:
            name = f"fxserve_{stage}_duration_seconds"
            return Histogram(name, text, buckets=_STAGE_SECONDS, registry=registry)

        self._requests = counter("requests", "Requests answered.", ("method", "route", "status"))
        self._request_seconds = Histogram(
            "fxserve_request_duration_seconds",
            "From the request's head to the end of its answer.",
            ("method", "route"),
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        # Finding a series by its labels takes as long as counting in it.
        self._series: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._stage_seconds = {
            "decode": seconds("decode", "Decoding and preprocessing the images of a request."),
            "queue": seconds("queue", "Waiting of a decoded request for the device."),
            "compute": seconds("compute", "The batches that held rows of a request."),
            "encode": seconds("encode", "Writing the answer to a request."),
        }
        self.batch_size = Histogram(
            "fxserve_batch_size", "Rows of a batch that was computed.", buckets=_ROWS, registry=registry
        )
        self.batch_failures = counter("batch_failures", "Batches that failed, by cause.", ("cause",))
        self.worker_restarts = counter("worker_restarts", "Device threads that died and were replaced.")
        self.evictions = counter(
            "evictions", "What was put out of memory (weights, extractor, graph, record), and why.", ("kind", "reason")
        )
        self.store_errors = counter("store_errors", "What the store of extractors failed at.", ("operation",))
        self.store_up = gauge("store_up", "Processes that can read the store of extractors.")
        self.inflight_requests = gauge("inflight_requests", "Requests admitted and not answered yet.")
        self.inflight_bytes = gauge("inflight_bytes", "Bytes that these decode to and answer with, by prediction.")
        self.queue_size = gauge("queue_size", "Items that wait for the device.")
        self.tasks = gauge("tasks", "Unfinished tasks of the event loop.")
        self.models_loaded = gauge("models_loaded", "Sets of weights in memory.")
        self.extractors = gauge("extractors", "Extractors, by state; evicted ones are built again.", ("state",))
        self.memory_bytes = gauge("memory_bytes", "What weights, extractors and graphs take of the memory budget.")
        self.memory_budget_bytes = gauge("memory_budget_bytes", "The memory budget.")
        self.ready = gauge("ready", "Processes that are ready, as /readyz says.")
        self.gpu_memory_allocated_bytes = gauge("gpu_memory_allocated_bytes", "In tensors, by torch.", ("device",))
        self.gpu_memory_reserved_bytes = gauge("gpu_memory_reserved_bytes", "Held by torch's allocator.", ("device",))
        self.gpu_memory_used_bytes = gauge("gpu_memory_used_bytes", "Used on the device by anyone.", ("device",))
        self.gpu_memory_total_bytes = gauge("gpu_memory_total_bytes", "The device's memory.", ("device",))

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one finished request and its stages; ``status`` 0 is one that broke off before its answer began.

        The client has its answer by then, and does not wait for this.
        """
        route = route_template(scope)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        series = self._series.get((method, route, status))
        if series is None:
            series = self._requests.labels(method, route, str(status)), self._request_seconds.labels(method, route)
            self._series[method, route, status] = series
        requests, request_seconds = series
        requests.inc()
        request_seconds.observe(seconds)
        milliseconds = scope.get(STAGES_TAKEN)
        if milliseconds is not None:
            for stage, histogram in self._stage_seconds.items():
                histogram.observe(milliseconds.get(stage, 0.0) / 1000)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format. Takes milliseconds: not for the event loop."""
        if self.shared_dir is None:
            return generate_latest(self.registry)
        _forget_the_dead(Path(self.shared_dir))
        registry = CollectorRegistry()
        registry.register(_AllProcesses(Path(self.shared_dir)))
        return generate_latest(registry)


class _AllProcesses(Collector):
    """What all processes that share ``folder`` counted.

    A file is empty between its creation and its first value, and stays so if its process is killed there;
    prometheus_client would fail on it, and with it every answer to ``/metrics``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        files = []
        for file in self._folder.glob("*.db"):
            with contextlib.suppress(FileNotFoundError):  # another process forgets the dead at the same time
                if file.stat().st_size:
                    files.append(str(file))
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return merged


def route_template(scope: Scope) -> str:
    """``/v1/models/{model}``; paths themselves would let a stranger make series without end."""
    return getattr(scope.get("route"), "path", None) or "unmatched"


def _forget_the_dead(folder: Path) -> None:
    """Take the gauges of processes that ended, however that was, out of the sums."""
    for file in folder.glob("gauge_live*_*.db"):
        process = int(file.stem.rpartition("_")[2])
        # It lives, as somebody else; or another process is first.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                mark_process_dead(process, str(folder))  # type: ignore[no-untyped-call]


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
