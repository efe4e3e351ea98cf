"""What an operator sees of ``fxserve serve``: metrics of all its processes as one, JSON log lines, spans."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from service.observability.metrics import STAGES
from tests.e2e.conftest import Server, until
from tests.processes import QuietHandler, serving
from tests.wire import sent

FEATURES = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.3&pool=avg"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Serve(Server):
    """``fxserve serve`` with a log of JSON lines."""

    def command(self) -> list[str]:
        return [*super().command(), "--log-format", "json", "--log-level", "info"]

    def lines(self) -> list[dict[str, Any]]:
        """Its log lines so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if not line.startswith("fxserve on ")]


@pytest.fixture(scope="module")
def spans() -> Iterator[list[Any]]:
    """Every span that reaches a collector on this machine."""
    taken: list[Any] = []

    class Collector(QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    taken.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

    with serving(Collector) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield taken


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, spans: list[Any]) -> Iterator[Serve]:
    server = Serve(tmp_path_factory.mktemp("serve"), tracing="true")
    server.wait()
    yield server
    server.stop()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Two processes as one server; the last test that uses it kills one of them."""
    server = Serve(tmp_path_factory.mktemp("pair"), workers=2)
    server.wait()
    yield server
    server.stop()


@pytest.mark.exhaustive
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("workers", [1, 2])
def test_all_interfaces_are_those_of_both_families(workers: int, tmp_path: Path) -> None:
    server = Serve(tmp_path, host="::", workers=workers)
    try:
        server.wait()  # over IPv4
        assert httpx.get(f"http://[::1]:{server.port}/healthz", timeout=60).status_code == 200
        assert f"fxserve on http://[::1]:{server.port} " in server.log.read_text()
    finally:
        server.stop()


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_processes_share_the_memory_of_what_is_imported(pair: Serve) -> None:
    until(lambda: pair.ready() == 2)
    parent = psutil.Process(pair.process.pid)
    for child in parent.children():
        assert child.memory_full_info().uss < parent.memory_info().rss / 5


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_share_weights(pair: Serve, photos: dict[str, bytes]) -> None:
    parent = psutil.Process(pair.process.pid)

    def asked_and_mapped() -> bool:
        assert pair.ask("POST", FEATURES, **sent(photos["coffee"])).status_code == 200
        maps = [[m for m in child.memory_maps() if "/weights/" in m.path] for child in parent.children()]
        assert all(m.rss > 4_000_000 and m.anonymous == 0 for of_one in maps for m in of_one)
        return all(maps) and len({m.path for of_one in maps for m in of_one}) == 1

    until(asked_and_mapped)


@pytest.mark.exhaustive
def test_two_processes_count_as_one(pair: Serve) -> None:
    until(lambda: pair.ready() == 2)
    healthy = 'fxserve_requests_total{method="GET",route="/healthz",status="200"}'
    before = pair.metric(healthy)
    for _ in range(40):
        assert pair.ask("GET", "/healthz").status_code == 200
    answered = {line["process"] for line in pair.lines() if line.get("path") == "/healthz"}
    assert len(answered) == 2
    assert {pair.metric(healthy) for _ in range(10)} == {before + 40}
    assert pair.ask("GET", "/metrics").text.count(healthy) == 1

    victim = answered.pop()
    os.kill(victim, signal.SIGKILL)
    until(lambda: "was ended by signal 9" in pair.log.read_text())
    until(lambda: pair.ready() == 2)
    assert pair.metric(healthy) == before + 40  # what the dead one counted stays counted


def test_log_lines_name_their_request(serve: Serve, photos: dict[str, bytes]) -> None:
    assert serve.http.post(FEATURES, **sent(photos["chelsea"], **{"x-request-id": "abc-1"})).status_code == 200
    [line] = until(lambda: [line for line in serve.lines() if line.get("request_id") == "abc-1"])
    assert line["duration_ms"] > 0
    del line["duration_ms"], line["time"], line["process"]
    assert line == {
        "level": "info",
        "logger": "fxserve.access",
        "message": line["message"],
        "request_id": "abc-1",
        "method": "POST",
        "path": "/v1/models/squeezenet1_1/features",
        "status": 200,
        "client": "127.0.0.1",
        "key": None,
    }


def test_a_request_is_a_span_with_its_stages(serve: Serve, photos: dict[str, bytes], spans: list[Any]) -> None:
    response = serve.http.post(FEATURES, **sent(photos["coffee"], traceparent=f"00-{TRACE}-{PARENT}-01"))
    assert response.status_code == 200
    own = until(lambda: found if len(found := [s for s in spans if s.trace_id.hex() == TRACE]) == 5 else None)
    [root] = [span for span in own if span.parent_span_id.hex() == PARENT]
    assert root.name == "POST /v1/models/{model}/features"
    told = {entry.key: entry.value for entry in root.attributes}
    assert told["http.response.status_code"].int_value == 200
    assert told["http.route"].string_value == "/v1/models/{model}/features"
    stages = sorted((span for span in own if span is not root), key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in stages] == list(STAGES)
    assert all(span.parent_span_id == root.span_id for span in stages)
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    for span in stages:
        milliseconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        assert milliseconds == pytest.approx(float(timing[span.name]), abs=0.001)
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
