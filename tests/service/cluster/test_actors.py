"""Engines of actors, and what they require of their node; without Ray."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fxcore.errors import FxError
from service.engine import FeatureOptions
from service.offline.outputs.spec_file import SpecFile
from service.schemas.specs import ExtractorSpec
from service.settings import Settings

pytest.importorskip("pyarrow")

from service.cluster.actors import EngineConfig, ExtractingActor, given_settings

SPEC = ExtractorSpec(model="squeezenet1_1", weights="random", return_nodes=["features.12"])


def test_settings_that_the_run_does_not_give_are_those_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSERVE_MAX_PIXELS", "1000")
    monkeypatch.setenv("FXSERVE_MAX_BATCH", "2")
    engine = EngineConfig(
        given_settings(Settings(max_pixels=2000, memory_budget=3000), 1), SPEC, FeatureOptions(), None, 10
    )
    sent = pickle.dumps(engine)
    monkeypatch.setenv("FXSERVE_MAX_BATCH", "4")
    monkeypatch.setenv("FXSERVE_MAX_BODY_BYTES", "5")
    settings = pickle.loads(sent).settings()
    assert (settings.max_pixels, settings.memory_budget, settings.max_batch) == (2000, 3000, 2)
    assert (settings.max_body_bytes, settings.compute_threads) == (5, 1)


def test_a_node_that_does_not_share_the_folder_is_refused(tmp_path: Path) -> None:
    engine = EngineConfig({}, SPEC, FeatureOptions(), None, 1)
    with pytest.raises(FxError, match=f"does not see {tmp_path}; --out must be a bucket or a folder that all nodes"):
        ExtractingActor(engine, SpecFile({}), None, tmp_path)
