"""Every step of a request leaves its mark in the metrics, and the dashboard asks for nothing else."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.observability import metric_files
from service.observability.metrics import SHARED_DIR, _AllProcesses, keep_updated

DASHBOARD = Path(__file__).parents[3] / ".deploy/grafana/dashboards/fxserve.json"
FEATURES = "/v1/models/{}/features?weights=random&nodes=features.3&pool=avg"
JPEG = {"content-type": "image/jpeg"}


def samples(client):
    """Every sample of /metrics: ``(name, {label: value})`` → value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def value(found, name, **labels):
    return found.get((name, frozenset(labels.items())), 0)


def test_what_memory_is_of_names_variants(make_client):
    helps = {
        family.name: family.documentation
        for family in text_string_to_metric_families(make_client().get("/metrics").text)
    }
    assert "variant" in helps["fxserve_evictions"]
    assert "variant" in helps["fxserve_memory_bytes"]


def test_a_request_through_all_stages(make_client, photos):
    client = make_client()
    before = value(samples(client), "fxserve_memory_bytes")  # graphs that other tests traced in this process
    files = [("a", ("a.jpg", photos[name], "image/jpeg")) for name in ("chelsea", "coffee", "rocket")]
    response = client.post(FEATURES.format("squeezenet1_1"), files=files)
    assert response.status_code == 200
    assert client.post(FEATURES.format("squeezenet1_1"), content=b"no", headers=JPEG).status_code == 422
    found = samples(client)
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    for stage in ("decode", "queue", "compute", "encode"):
        assert value(found, f"fxserve_{stage}_duration_seconds_count") == 1
        spent = value(found, f"fxserve_{stage}_duration_seconds_sum")
        assert abs(spent * 1000 - float(timing[stage])) < 0.01
    assert value(found, "fxserve_batch_size_sum") == 3
    assert value(found, "fxserve_models_loaded") == 1
    assert value(found, "fxserve_extractors", state="ready") == 1
    assert value(found, "fxserve_ready") == 1
    assert value(found, "fxserve_inflight_requests") == value(found, "fxserve_inflight_bytes") == 0
    # SqueezeNet's parameters, its graph and the extractor's.
    assert 1_200_000 * 4 < value(found, "fxserve_memory_bytes") - before < 2 * 1_300_000 * 4
    assert value(found, "process_resident_memory_bytes") > 10_000_000


def test_evictions_say_why(make_client, no_graphs, photos):
    client = make_client(memory_budget=9_500_000)  # a graph takes half a megabyte
    assert client.post(FEATURES.format("squeezenet1_1"), content=photos["coffee"], headers=JPEG).status_code == 200
    assert client.post(FEATURES.format("squeezenet1_0"), content=photos["coffee"], headers=JPEG).status_code == 200
    found = samples(client)
    assert value(found, "fxserve_evictions_total", kind="weights", reason="memory_budget") == 1
    assert value(found, "fxserve_evictions_total", kind="extractor", reason="memory_budget") == 1
    assert value(found, "fxserve_extractors", state="evicted") == 1
    assert value(found, "fxserve_models_loaded") == 1
    [kept] = [e["id"] for e in client.get("/v1/extractors").json()["extractors"] if e["model"] == "squeezenet1_0"]
    assert client.delete(f"/v1/extractors/{kept}").status_code == 204
    assert value(samples(client), "fxserve_evictions_total", kind="weights", reason="deleted") == 1


def test_the_dashboard_asks_for_what_there_is(client):
    there = set(re.findall(r"^# TYPE (\w+)", client.get("/metrics").text, re.MULTILINE))
    there |= {f"{name}_{part}" for name in list(there) for part in ("bucket", "sum", "count")}
    document = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    queries += [
        variable["query"]["query"] for variable in document["templating"]["list"] if variable["type"] == "query"
    ]
    asked = {name for query in queries for name in re.findall(r"\b(?:fxserve|process)_\w+", query)}
    assert len(asked) > 20
    assert asked <= there


def printed(script, folder, *arguments):
    """Run a script that shares its metrics through ``folder``, which prometheus_client reads when it is imported."""
    environment = {**os.environ, SHARED_DIR: str(folder)}
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


def test_a_file_that_another_process_has_only_created_is_passed_over(tmp_path):
    script = """
import os
from service.observability.metrics import Metrics
metrics = Metrics()
metrics.ready.set(1)
os.close(os.open(os.path.join(metrics.shared_dir, f"gauge_livesum_{os.getppid()}.db"), os.O_CREAT))
os.close(os.open(os.path.join(metrics.shared_dir, f"counter_{os.getppid()}.db"), os.O_CREAT))
print(metrics.text().decode())
"""
    assert "\nfxserve_ready 1.0\n" in printed(script, tmp_path)[0]


def test_memory_of_a_gpu_that_processes_share_counts_once(tmp_path):
    script = """
import os
from service.observability.metrics import Metrics
child = os.fork()
metrics = Metrics()
metrics.gpu_memory_total_bytes.labels("cuda:0").set(80)
metrics.gpu_memory_used_bytes.labels("cuda:0").set(33 if child else 32)
metrics.gpu_memory_allocated_bytes.labels("cuda:0").set(10)
if child:
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its id stays taken, as if it were running
    print(metrics.text().decode())
"""
    memory = {
        sample.name.removeprefix("fxserve_gpu_memory_"): sample.value
        for family in text_string_to_metric_families(printed(script, tmp_path)[0])
        for sample in family.samples
        if "gpu_memory" in sample.name
    }
    assert memory == {"total_bytes": 80, "used_bytes": 33, "allocated_bytes": 20}


def test_gauges_are_updated_again_after_a_failure(caplog):
    """As on a disk that was full for a while."""
    updates = 0

    def update() -> None:
        nonlocal updates
        updates += 1
        if updates in (1, 2, 4):
            raise OSError("No space left on device")

    async def sampled() -> None:
        task = asyncio.create_task(keep_updated(update, 0.001))
        while updates < 6:
            assert not task.done()
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(sampled())
    assert [record.getMessage() for record in caplog.records].count(
        "the metrics of this process could not be updated; it is tried again"
    ) == 2


COUNTING = """
import asyncio, os, sys
from service.observability.metrics import Metrics
metrics = Metrics()
with open(os.path.join(sys.argv[1], "filler"), "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        pass
for number in range(300):
    metrics.batch_failures.labels(f"{number:0100}").inc()
    metrics.batch_size.observe(number)
print(metrics.text().decode().count("fxserve_batch_failures_total{"))
"""


@pytest.mark.parametrize(("size", "counted"), [("2m", 300), ("64k", 0)])
def test_a_full_disk_ends_no_process(tmp_path, size, counted):
    """It may be full before the files of the metrics are made, or become so afterwards."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the permission to mount a file system")
    try:
        count, warnings = printed(COUNTING, tmp_path, str(tmp_path))
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert int(count) == counted
    assert ("lacks what this process counts" in warnings) == (counted == 0)


def test_metrics_for_which_there_is_no_room_stay_in_memory(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    file = metric_files._Allocated(str(tmp_path / "counter_1.db"))
    file.write_value("key", 3.0, 0.0)
    assert file.read_value("key")[0] == 3
    assert "No space left on device" in caplog.text
    assert list(_AllProcesses(tmp_path).collect()) == []
