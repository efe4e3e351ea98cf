"""What ``fxserve serve`` tries before it starts, how it starts and ends."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxcore.errors import FxError
from service.cli.commands import serving
from service.engine.extractors.store import Store
from service.http.server import supervisor
from service.http.server.run import run_workers
from service.settings import SHARED_WEIGHTS, Settings
from tests.service.cli.running import fails, fxserve
from tests.service.engine.extractors.conftest import bucket
from tests.small_disk import small_disk

__all__ = ["bucket"]


def test_a_full_disk_ends_the_start_only_where_there_is_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = str(disk.path / "store")
        Store(url).check()
        disk.fill()
        serving._check_dependencies(Settings(extractors=url))
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "No space left on device; existing extractors are served, but none can be added or deleted" in said
        with pytest.raises(FxError, match=r"cannot be written: OSError: \[Errno 28\] No space left"):
            serving._check_dependencies(Settings(extractors=str(disk.path / "other")))
        disk.free()
        serving._check_dependencies(Settings(extractors=url))
        assert capsys.readouterr().err == ""


def test_the_driver_that_the_check_uses_is_closed_before_the_server_starts(bucket: str) -> None:
    """Otherwise it is closed on the server's event loop, which logs an error."""

    def drivers() -> int:
        return sum(type(found).__name__ == "S3FileSystem" for found in gc.get_objects())

    gc.collect()
    before = drivers()
    serving._check_dependencies(Settings(extractors=f"{bucket}/checked"))
    assert drivers() == before


@pytest.mark.parametrize("host", ["no such host", "a..b"])
def test_a_host_that_cannot_be_resolved_is_refused(host: str) -> None:
    with pytest.raises(FxError, match=rf"^host: '{host}' cannot be resolved; use an address of this machine"):
        serving._check_dependencies(Settings(host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::"])
def test_addresses_of_this_machine(host: str) -> None:
    serving._check_dependencies(Settings(host=host))


def test_extractors_to_preload_must_be_readable() -> None:
    serving._check_dependencies(Settings(preload=("resnet18@random:C4,C5", "resnet18@file:mine.pth", "resnet18")))
    with pytest.raises(FxError, match=r"^FXSERVE_PRELOAD: 'resnet18:' is not MODEL:NODE,NODE, such as resnet50:C4,C5"):
        serving._check_dependencies(Settings(preload=("resnet18@random:C4", "resnet18:")))
    with pytest.raises(FxError, match=r"^FXSERVE_PRELOAD: 'x{100}': String should have at most [0-9]+ characters$"):
        serving._check_dependencies(Settings(preload=(600 * "x" + ":C4",)))


def test_a_missing_folder_of_weights_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serving._check_dependencies(Settings(weights_dir=tmp_path))
    assert capsys.readouterr().err == ""
    serving._check_dependencies(Settings(weights_dir=tmp_path / "gone"))  # it may be mounted later
    assert f"FXSERVE_WEIGHTS_DIR: there is no folder {tmp_path / 'gone'}; " in capsys.readouterr().err


def test_serve_runs_until_sigterm() -> None:
    environment = {**os.environ, "FXSERVE_MODELS": "resnet18", "FXSERVE_PORT": "1"}
    command = [sys.executable, "-c", "from service.cli import main; main()", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            match = re.fullmatch(
                r"fxserve on (http://127\.0\.0\.1:\d+) \(cpu\): open it in a browser; reference at (\S+), .*\n",
                line,
            )
            assert match is not None, line
            with urllib.request.urlopen(f"{match[1]}/v1/models", timeout=60) as response:
                assert [m["name"] for m in json.load(response)["models"]] == ["resnet18"]
            with urllib.request.urlopen(match[2], timeout=60) as response:
                assert response.status == 200
            server.send_signal(signal.SIGTERM)
            rest, errors = server.communicate(timeout=60)
        finally:
            server.kill()
    assert (server.returncode, rest, errors) == (0, "", "")


@pytest.fixture
def signals() -> Iterator[None]:
    """Serving in this process sets handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        result = fxserve("graph", "alexnet", "--out", disk.path / "graph.json")
    fails(result, 1, "No space left on device\n")


@pytest.mark.usefixtures("signals")
def test_serve_reports_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = fxserve("serve", "--device", "cpu", "--port", taken.getsockname()[1])
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "address already in use" in result.stderr


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> supervisor.Supervisor:
    """A supervisor of several processes that ended at once."""
    made: list[supervisor.Supervisor] = []
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self: made.append(self))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv(SHARED_WEIGHTS, "")  # so that it is taken back
    run_workers(Settings(workers=2, port=0, extractors=str(tmp_path)), "cuda")
    return made[0]


def test_the_socket_of_several_processes_closes_with_the_last(ended: supervisor.Supervisor) -> None:
    """The exit takes seconds. Connections accepted meanwhile would be reset."""
    assert [each.fileno() for each in ended.sockets] == [-1]


@pytest.mark.exhaustive
def test_spawned_processes_say_that_they_live_before_they_import_torch(ended: supervisor.Supervisor) -> None:
    """One that cannot say so is replaced by one that cannot, either: on a busy machine, without end."""
    assert ended.config.timeout_worker_healthcheck >= 120
    script = """
import pickle, sys
config = pickle.load(sys.stdin.buffer)
config.configure_logging()
print("torch" in sys.modules, end=" ")
config.load()
print("torch" in sys.modules)
"""
    config = pickle.dumps(ended.config)
    child = subprocess.run([sys.executable, "-c", script], input=config, capture_output=True, timeout=120)
    assert child.stdout.decode() == "False True\n", child.stderr


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("workers", [1, 2])
def test_serve_refuses_an_unreadable_key_file(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("nonsense\n")
    monkeypatch.setenv("FXSERVE_API_KEYS_FILE", str(keys))
    done = fxserve("serve", "--port", 18437, "--device", "cpu", "--workers", workers)
    fails(done, 1, f"{keys}, line 1: not NAME:read:SHA256")


@pytest.mark.usefixtures("signals")
def test_serve_warns_of_unknown_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of those that Kubernetes sets, nor of the key that clients send."""
    others = {"FXSERVE_SERVICE_HOST": "10.0.0.1", "FXSERVE_PORT_80_TCP_PORT": "80", "FXSERVE_API_KEY": "k"}
    misspelt = {"FXSERVE_PROT": "9", "FXSERVE_API_KEY_FILE": "keys.txt"}
    missing = {"FXSERVE_API_KEYS_FILE": str(tmp_path / "none")}  # so that it ends before it serves
    for name, value in (others | misspelt | missing).items():
        monkeypatch.setenv(name, value)
    assert fxserve("serve", "--device", "cpu").stderr.splitlines()[:-1] == [
        "fxserve: unknown variable FXSERVE_API_KEY_FILE; did you mean FXSERVE_API_KEYS_FILE?",
        "fxserve: unknown variable FXSERVE_PROT; did you mean FXSERVE_PORT?",
    ]


@pytest.mark.usefixtures("signals")
def test_serve_warns_of_limits_above_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSERVE_API_KEYS_FILE", str(tmp_path / "none"))  # so that it ends before it serves
    monkeypatch.setenv("FXSERVE_MAX_INFLIGHT_BYTES", "1")
    monkeypatch.setenv("FXSERVE_MEMORY_BUDGET", str(2**50))
    [warning, _] = fxserve("serve", "--device", "cpu").stderr.splitlines()
    allowed = "FXSERVE_MEMORY_BUDGET and FXSERVE_MAX_INFLIGHT_BYTES allow 1048576.0 GiB"
    assert re.fullmatch(rf"fxserve: {allowed}, but only [\d.]+ GiB are available", warning)


@pytest.mark.usefixtures("signals")
def test_serve_reports_missing_tracing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "service.observability.trac"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setenv("FXSERVE_TRACING", "true")
    done = fxserve("serve", "--port", 18437, "--device", "cpu", "--workers", 2)
    fails(done, 1, "FXSERVE_TRACING needs the extra otel: pip install 'fxserve[otel]'")
