"""Prometheus metrics. Each service has its own registry, so that two services in one process do not mix.

If there are several server processes, each reports the metrics of all: they share the folder
``PROMETHEUS_MULTIPROC_DIR`` (prometheus_client's multiprocess mode). Counters and histograms are summed over all
processes, gauges over live ones, except the memory of a GPU as a whole, which all of them report. The ``process_*``
metrics describe a single process and are then omitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from starlette.types import Scope

from service.observability.metric_files import allocate_files

log = logging.getLogger("fxserve")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SHARED_DIR = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder shared by server processes."""

# From a cached node list to a cold start of a model.
_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

STAGES = ("decode", "queue", "compute", "encode")

STAGE_TIMES = "fxserve.stages"
"""Key in the scope of a feature request: milliseconds of each stage."""


class Metrics:
    """The metrics of a service. Counters and histograms are thread-safe."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.shared_dir = os.environ.get(SHARED_DIR)
        if self.shared_dir is None:
            ProcessCollector(registry=registry)
        else:
            allocate_files()
            if values.ValueClass is values.MutexValue:  # prometheus_client was imported before the variable was set
                values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]

        def gauge(
            name: str,
            text: str,
            labels: tuple[str, ...] = (),
            of_processes: Literal["livesum", "livemax"] = "livesum",
        ) -> Gauge:
            return Gauge(f"fxserve_{name}", text, labels, registry=registry, multiprocess_mode=of_processes)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"fxserve_{name}", text, labels, registry=registry)

        def seconds(stage: str, text: str) -> Histogram:
            name = f"fxserve_{stage}_duration_seconds"
            return Histogram(name, text, buckets=_STAGE_SECONDS, registry=registry)

        self._requests = counter("requests", "Requests answered.", ("method", "route", "status"))
        self._request_seconds = Histogram(
            "fxserve_request_duration_seconds",
            "Time from the head of a request to the end of its response.",
            ("method", "route"),
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        # Cached, because looking up a series by its labels takes as long as counting.
        self._series: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._stage_seconds = {
            "decode": seconds("decode", "Decoding and preprocessing the images of a request."),
            "queue": seconds("queue", "Waiting of a decoded request for the device."),
            "compute": seconds("compute", "Computing the batches with rows of a request."),
            "encode": seconds("encode", "Encoding the response to a request."),
        }
        self.batch_size = Histogram("fxserve_batch_size", "Rows per computed batch.", buckets=_ROWS, registry=registry)
        self.batch_failures = counter("batch_failures", "Batches that failed, by cause.", ("cause",))
        self.worker_restarts = counter("worker_restarts", "Device workers that died and were replaced.")
        self.evictions = counter(
            "evictions",
            "Evictions from memory, by kind (weights, extractor, variant, graph, projection, record) and reason.",
            ("kind", "reason"),
        )
        self.store_errors = counter("store_errors", "Failed operations of the extractor store.", ("operation",))
        self.store_up = gauge("store_up", "Processes that can read the extractor store.")
        self.inflight_requests = gauge("inflight_requests", "Requests in flight: admitted and not answered yet.")
        self.inflight_bytes = gauge(
            "inflight_bytes", "Predicted bytes of decoded inputs and responses of requests in flight."
        )
        self.queue_size = gauge("queue_size", "Items waiting for the device.")
        self.tasks = gauge("tasks", "Unfinished tasks of the event loop.")
        self.models_loaded = gauge("models_loaded", "Sets of weights in memory.")
        self.extractors = gauge("extractors", "Extractors, by state; evicted ones are rebuilt on demand.", ("state",))
        self.memory_bytes = gauge(
            "memory_bytes",
            "Bytes of the memory budget in use by weights, extractors, their variants, graphs and projections.",
        )
        self.memory_budget_bytes = gauge("memory_budget_bytes", "The memory budget.")
        self.ready = gauge("ready", "Processes that are ready, as reported by /readyz.")
        self.gpu_memory_allocated_bytes = gauge(
            "gpu_memory_allocated_bytes", "GPU memory in torch tensors.", ("device",)
        )
        self.gpu_memory_reserved_bytes = gauge(
            "gpu_memory_reserved_bytes", "GPU memory held by torch's allocator.", ("device",)
        )
        # Each process reports these of the whole device.
        self.gpu_memory_used_bytes = gauge(
            "gpu_memory_used_bytes", "GPU memory used by all processes.", ("device",), "livemax"
        )
        self.gpu_memory_total_bytes = gauge("gpu_memory_total_bytes", "Total GPU memory.", ("device",), "livemax")

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a finished request and its stages. Call it after the response is sent.

        Args:
            scope: scope of the request.
            status: status of the response; 0 if the request was aborted before its response began.
            seconds: duration of the request.
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
        milliseconds = scope.get(STAGE_TIMES)
        if milliseconds is not None:
            for stage, histogram in self._stage_seconds.items():
                histogram.observe(milliseconds.get(stage, 0.0) / 1000)

    def text(self) -> bytes:
        """Render all metrics in Prometheus' text format. Slow, so do not call it on the event loop."""
        if self.shared_dir is None:
            return generate_latest(self.registry)
        _drop_dead_processes(Path(self.shared_dir))
        registry = CollectorRegistry()
        registry.register(_AllProcesses(Path(self.shared_dir)))
        return generate_latest(registry)


class _AllProcesses(Collector):
    """Collects the metrics of all processes that share ``folder``.

    Empty files are skipped, because prometheus_client fails on them: a file is empty until its first value is written,
    and stays empty if its process is killed before that.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        files = []
        for file in self._folder.glob("*.db"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it first
                if file.stat().st_size:
                    files.append(str(file))
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return merged


def route_template(scope: Scope) -> str:
    """Return the path template of the request's route, such as ``/v1/models/{model}``.

    Raw paths would be unbounded labels.
    """
    return getattr(scope.get("route"), "path_format", None) or "unmatched"


def _drop_dead_processes(folder: Path) -> None:
    """Remove the gauges of processes that have ended."""
    for file in folder.glob("gauge_live*_*.db"):
        process = int(file.stem.rpartition("_")[2])
        # The id was reused by another user's process, or another process removed the file first.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                mark_process_dead(process, str(folder))  # type: ignore[no-untyped-call]


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


async def keep_updated(update: Callable[[], object], seconds: float) -> None:
    """Call ``update``, which updates metrics, every ``seconds`` until cancelled.

    A failure, for example on a full disk, is logged once until an update succeeds.
    """
    failing = False
    while True:
        try:
            update()
            failing = False
        except Exception:
            if not failing:
                log.exception("the metrics of this process could not be updated; it is tried again")
            failing = True
        await asyncio.sleep(seconds)
