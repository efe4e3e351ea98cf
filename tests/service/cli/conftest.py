"""Files on disk for the tests of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fxcore.models.catalog import register


@pytest.fixture(autouse=True)
def no_weights_on_disk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Describe models of one's own: ``own_models(text of models.toml)``."""
    folder = tmp_path / "own models"
    folder.mkdir()
    monkeypatch.setenv("FXSERVE_MODELS_DIR", str(folder))
    yield (folder / "models.toml").write_text
    register({})


@pytest.fixture
def files(tmp_path: Path, photos: dict[str, bytes]) -> list[Path]:
    """Photographs of a cat and a cup of coffee."""
    paths = [tmp_path / "cat.jpg", tmp_path / "coffee.jpg"]
    for path, name in zip(paths, ("chelsea", "coffee"), strict=True):
        path.write_bytes(photos[name])
    return paths
