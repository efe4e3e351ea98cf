"""A real Prometheus, with our configuration, scrapes a running server; every query of the dashboard finds data in it.

Needs the programs ``prometheus`` and ``promtool`` (Debian's package ``prometheus``); without them the dashboard's names
are still compared with the exported ones, in ``tests/service/observability/test_metrics.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, until
from tests.processes import free_port
from tests.wire import sent

DEPLOY = Path(__file__).parent.parent.parent / ".deploy"
FEATURES = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.3&pool=avg"

# What a healthy server on a CPU has nothing to say of.
SILENT = ("gpu_memory", "evictions", "batch_failures")

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus") or not shutil.which("promtool"), reason="Prometheus is not installed"
)


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it answers."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = (DEPLOY / "prometheus.yaml").read_text()
    assert '"fxserve:8000"' in config
    config = config.replace("fxserve:8000", f"127.0.0.1:{server.port}").replace("5s", "1s")
    (folder / "prometheus.yml").write_text(config)
    port = free_port()
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def test_promtool_takes_the_configuration() -> None:
    subprocess.run(["promtool", "check", "config", str(DEPLOY / "prometheus.yaml")], check=True)


def test_promtool_takes_the_metrics(server: Server) -> None:
    """Their names and texts are as Prometheus' conventions want them."""
    text = server.http.get("/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.exhaustive
def test_every_query_of_the_dashboard_finds_data(prometheus: str, server: Server, photos: dict[str, bytes]) -> None:
    def query(text: str) -> Any:
        found = httpx.get(f"{prometheus}/api/v1/query", params={"query": text}).json()
        assert found["status"] == "success", (text, found)
        return found["data"]["result"]

    def answered() -> float:
        counted = query('sum(fxserve_requests_total{route="/v1/models/{model}/features"})')
        return float(counted[0]["value"][1]) if counted else 0.0

    def ask() -> None:
        assert server.http.post(FEATURES, **sent(photos["coffee"])).status_code == 200

    until(lambda: _up(prometheus))
    ask()
    until(answered)
    before = answered()
    ask()
    until(lambda: answered() > before)

    document = json.loads((DEPLOY / "grafana/dashboards/fxserve.json").read_text())
    queries = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 30
    for text in queries:
        result = query(text.replace("$instance", ".*").replace("$__rate_interval", "1m"))
        if not any(name in text for name in SILENT):
            assert result, text
            assert any(entry["value"][1] != "NaN" for entry in result), text


def _up(prometheus: str) -> bool:
    try:
        return httpx.get(f"{prometheus}/-/ready").status_code == 200
    except httpx.TransportError:
        return False
