"""Defaults that depend on the machine, what an empty variable means, and folders that have to be there."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.settings import Settings


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


@pytest.mark.parametrize("name", ["cache_dir", "calibration_dir", "models_dir", "weights_dir", "api_keys_file"])
def test_an_empty_path_is_none_and_not_the_working_directory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"FXSERVE_{name.upper()}", "")
    assert getattr(Settings(), name) is None


def test_an_empty_host_is_refused_and_not_every_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSERVE_HOST", "")
    with pytest.raises(ValidationError, match="host"):
        Settings()


def test_a_folder_to_calibrate_on_is_there_at_the_start(tmp_path: Path) -> None:
    assert Settings(calibration_dir=tmp_path).calibration_dir == tmp_path
    with pytest.raises(ValidationError, match=f"there is no folder {tmp_path / 'gone'}"):
        Settings(calibration_dir=tmp_path / "gone")
