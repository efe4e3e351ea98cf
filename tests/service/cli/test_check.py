"""What ``fxserve check`` says."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.service.cli.running import fxserve


def test_check_says_what_will_be_used_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXSERVE_DEVICE", "cpu")
    monkeypatch.setenv("FXSERVE_COMPUTE_THREADS", "3")
    monkeypatch.setenv("FXSERVE_CACHE_DIR", str(tmp_path / "kept"))
    done = fxserve("check")
    assert done.exit_code == 0, done.output
    told = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert told["device"].split()[1:3] == ["cpu", "FXSERVE_DEVICE=cpu;"]
    assert "3 compute" in told["threads"]
    assert "serves first" in told["backend eager"]
    assert "CUDA graphs need a CUDA device" in told["backend cudagraphs"]
    assert f"{tmp_path / 'kept'}" in told["compiled models"]
    assert "writable" in told["compiled models"]
    assert version("torch") in told["versions"]


def test_check_fails_where_the_settings_cannot_be_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXSERVE_WEIGHTS_DIR", str(tmp_path / "missing"))
    done = fxserve("check")
    assert done.exit_code == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("own weights")]
    assert line.endswith("problem")
    monkeypatch.setenv("FXSERVE_DEVICE", "cuda:99")
    done = fxserve("check")
    assert done.exit_code == 1
    assert "cuda:99" in done.stdout
