"""Defaults that depend on the machine, what an empty variable means, and folders that have to be there."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.settings import GiB, Settings


@pytest.mark.parametrize(
    ("device", "cores", "workers", "rows"),
    [
        ("cpu", 1, 1, 8),
        ("cpu", 2, 1, 8),
        ("cpu", 6, 1, 24),
        ("cpu", 64, 1, 32),
        ("cpu", 16, 4, 16),
        ("cuda:1", 2, 1, 32),
    ],
)
def test_rows_of_a_batch(monkeypatch: pytest.MonkeyPatch, device: str, cores: int, workers: int, rows: int) -> None:
    monkeypatch.setattr("service.settings.available_cores", lambda: cores)
    assert Settings(device=device, workers=workers).max_batch == rows
    assert Settings(device=device, workers=workers, max_batch=5).max_batch == 5
    assert Settings(device=device, workers=workers, compute_threads=3).max_batch == (32 if device == "cuda:1" else 12)


@pytest.mark.parametrize(
    ("available", "workers", "budget", "in_flight"),
    [
        (512 * GiB, 1, 8 * GiB, 2 * GiB),
        (16 * GiB, 1, 8 * GiB, 2 * GiB),
        (4 * GiB, 1, 2 * GiB, GiB // 2),
        (16 * GiB, 4, 2 * GiB, GiB // 2),
    ],
)
def test_limits_of_memory(
    monkeypatch: pytest.MonkeyPatch, available: int, workers: int, budget: int, in_flight: int
) -> None:
    monkeypatch.setattr("service.settings.available_memory", lambda: available)
    settings = Settings(workers=workers)
    assert (settings.memory_budget, settings.max_inflight_bytes) == (budget, in_flight)
    assert settings.needed_memory() < available
    assert Settings(workers=workers, memory_budget=9 * GiB).memory_budget == 9 * GiB


@pytest.mark.parametrize("name", ["cache_dir", "calibration_dir", "models_dir", "weights_dir", "api_keys_file"])
def test_an_empty_path_is_none_and_not_the_working_directory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"FXSERVE_{name.upper()}", "")
    assert getattr(Settings(), name) is None


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's user may be a mere number: no HOME, no entry in /etc/passwd."""
    for name in ("HOME", "XDG_CACHE_HOME", "FXSERVE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    assert Settings().cache_dir is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Settings().cache_dir == tmp_path / "fxserve"


def test_an_empty_host_is_refused_and_not_every_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSERVE_HOST", "")
    with pytest.raises(ValidationError, match="host"):
        Settings()


@pytest.mark.parametrize("name", ["compute_threads", "decode_threads", "encode_threads", "build_threads"])
def test_more_threads_than_any_machine_runs_are_refused(name: str) -> None:
    assert getattr(Settings(**{name: 1024}), name) == 1024
    with pytest.raises(ValidationError, match="should be less than or equal to 1024"):
        Settings(**{name: 1025})


def test_a_folder_to_calibrate_on_is_there_at_the_start(tmp_path: Path) -> None:
    assert Settings(calibration_dir=tmp_path).calibration_dir == tmp_path
    with pytest.raises(ValidationError, match=f"there is no folder {tmp_path / 'gone'}"):
        Settings(calibration_dir=tmp_path / "gone")


@pytest.mark.parametrize(
    "origin",
    [
        *("lab.example", "https://lab.example/", "https://Lab.example", "https://*.lab.example", "https://"),
        *("https://lab.example:443", "http://lab.example:80", "https://a@lab.example", "https://a https://b"),
        *("https://lab.example:0443", "https://lab.example:999999", "HTTPS://lab.example"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(monkeypatch: pytest.MonkeyPatch, origin: str) -> None:
    monkeypatch.setenv("FXSERVE_CORS_ORIGINS", f"https://fine.example,{origin}")
    with pytest.raises(ValidationError, match=f"{re.escape(repr(origin))} is not an origin as browsers send it"):
        Settings()


def test_origins_that_browsers_send(monkeypatch: pytest.MonkeyPatch) -> None:
    origins = (
        *("*", "null", "https://lab.example", "http://localhost:3000", "http://[::1]:8080", "https://lab.example:80"),
        *("http://lab.example:443", "http://lab.example:8080", "chrome-extension://abcdefgh", "http://10.0.0.1"),
        *("file://", "safari-web-extension://E8BEA491-9B80"),
    )
    monkeypatch.setenv("FXSERVE_CORS_ORIGINS", ", ".join(origins))
    assert Settings().cors_origins == origins


@pytest.mark.parametrize(
    "host",
    [
        "https://fx.example.com",
        "fx.example.com:8000",
        "fx.example.com/",
        "a b",
        "b\u00fccher.example",
        "cafe.de:8000",
        "10.0.0.1:8000",
    ],
)
def test_a_host_that_no_request_can_have_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("FXSERVE_HOSTS", f"fine.example.com,{host}")
    with pytest.raises(ValidationError, match=f"{re.escape(repr(host))} is not a host name"):
        Settings()


def test_hosts_and_patterns_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (
        *("fx.example.com", "*.Example.com", "fx[0-9].example.com", "fx.example.com.", "my_host.example.com", "::1"),
        *("[::1]", "2001:db8:*", "fe80::1%eth0"),
    )
    monkeypatch.setenv("FXSERVE_HOSTS", ",".join(hosts))
    assert Settings().hosts == hosts
