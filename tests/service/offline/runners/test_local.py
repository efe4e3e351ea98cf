"""The search for a faster backend at the start of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fxcore.backends import BACKENDS
from fxcore.errors import FxError
from service.engine.runtime.candidate import Candidate
from service.offline import extract
from service.offline.inputs import sources
from service.offline.inputs.sources import Source
from service.settings import Settings
from tests.service.engine.fake_backends import Broken
from tests.service.offline.conftest import SETTINGS, job


@pytest.fixture
def lowering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """With a backend that is always judged to be faster."""
    monkeypatch.setitem(BACKENDS, "openvino", Broken("none"))
    monkeypatch.setattr(Candidate, "judge", lambda self, other: True)
    return SETTINGS.model_copy(update={"lowering": True, "cache_dir": tmp_path / "cache"})


@pytest.mark.exhaustive
def test_a_faster_backend_is_looked_for_if_that_saves_time(
    folder: Callable[..., Path], tmp_path: Path, lowering: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = folder(3)

    def backend(name: str, settings: Settings = lowering) -> str:
        extract(job(tmp_path / name, images), settings)
        return str(json.loads((tmp_path / name / "spec.json").read_text())["backend"])

    monkeypatch.setattr("service.offline.run._MAX_COUNTED", 4)
    assert backend("few") == "eager"
    monkeypatch.setattr("service.offline.run._MAX_COUNTED", 3)
    assert backend("many") == "openvino"
    assert backend("not at all", SETTINGS) == "eager"


@pytest.mark.exhaustive
def test_images_are_only_counted_if_their_number_decides(
    folder: Callable[..., Path], tmp_path: Path, lowering: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting reads whole archives."""
    images = folder(5)
    find, found = sources.find, 0

    def counted(inputs: Sequence[str], *skipped: Any) -> Iterator[Source]:
        nonlocal found
        for source in find(inputs, *skipped):
            found += 1
            yield source

    def run(name: str, backend: str = "auto") -> int:
        before = found
        assert extract(job(tmp_path / name, images, spec={"backend": backend}), lowering).done == 5
        return found - before

    monkeypatch.setattr(sources, "find", counted)
    monkeypatch.setattr("service.offline.run._MAX_COUNTED", 3)
    assert run("eager", "eager") == 1 + 5  # the first one before the model is built
    assert run("auto") == 1 + 3 + 5
    assert run("found before") == 1 + 5
    assert run("auto") == 1 + 5  # it goes on with the same backend


def test_an_input_that_does_not_exist_is_an_error_before_anything_is_built(tmp_path: Path) -> None:
    unknown = job(tmp_path / "out", tmp_path / "*.jpeg", spec={"model": "unknown"})
    with pytest.raises(FxError, match="nothing matches this pattern"):
        extract(unknown, SETTINGS)
    assert not (tmp_path / "out").exists()
