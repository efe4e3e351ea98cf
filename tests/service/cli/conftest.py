"""Files on disk for the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_weights_on_disk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))


@pytest.fixture
def files(tmp_path: Path, photos: dict[str, bytes]) -> list[Path]:
    """Photographs of a cat and a cup of coffee."""
    paths = [tmp_path / "cat.jpg", tmp_path / "coffee.jpg"]
    for path, name in zip(paths, ("chelsea", "coffee"), strict=True):
        path.write_bytes(photos[name])
    return paths
