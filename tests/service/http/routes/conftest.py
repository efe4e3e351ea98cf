"""Fixtures for the tests of several routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.conftest import Client
from tests.wire import created


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of published weights, which has none."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub/checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def extractor(client: Client) -> str:
    """The features path of an extractor of resnet18's C4 and C5."""
    created(client, model="resnet18", weights="random", return_nodes={"layer3": "C4", "layer4": "C5"}, name="r18")
    return "/v1/extractors/r18/features"
