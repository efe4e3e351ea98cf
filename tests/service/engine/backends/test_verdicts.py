"""A second start takes over what the first one found, unless something speaks against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxcore.backends import BACKENDS
from fxcore.backends.eager import EagerModule
from service.engine import ExtractorRecord
from service.engine.backends.checks import Reference
from service.engine.backends.verdicts import KEPT, Verdicts
from service.settings import Settings
from tests.service.engine.fake_backends import Broken, settled
from tests.service.engine.running import MakeEngine, built

pytestmark = pytest.mark.anyio


@pytest.fixture
def start(
    engine: MakeEngine, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """``record, compared = await start(fault)``: an engine that finds out whether to take a backend twice as fast, and
    how often it compared anything on the way."""

    async def run(fault: str = "none", **settings: Any) -> tuple[ExtractorRecord, int]:
        compared: list[int] = []
        expected = Reference.expected

        def counted(self: Reference, *args: Any) -> Any:
            compared.append(1)
            return expected(self, *args)

        with monkeypatch.context() as patch:
            patch.setitem(BACKENDS, "openvino", Broken(fault))
            patch.setattr(Reference, "expected", counted)
            for one in ("timed", "fastest"):
                patch.setattr(Reference, one, lambda self, run, *rest: 1.0 if isinstance(run, EagerModule) else 0.5)
            async with engine(**{"lowering": True, "max_batch": 2, "cache_dir": tmp_path, **settings}) as running:
                record = await built(running, "squeezenet1_1", ("features.3",), backend="auto")
                await running.features(record, jpegs)
                await settled(record)
                return record, len(compared)

    return run


async def test_a_second_start_confirms_what_the_first_found(start: Callable[..., Any]) -> None:
    first, compared = await start()
    second, confirmed = await start()
    assert compared > 2 * confirmed
    assert confirmed == 2  # eager itself, and the other on a photograph
    assert first.backend == second.backend == "openvino"
    assert second.checks == first.checks


@pytest.mark.exhaustive
async def test_a_backend_that_no_longer_agrees_is_not_taken(start: Callable[..., Any]) -> None:
    await start()
    record, compared = await start("differs")
    assert record.backend == "eager"
    assert compared > 2  # and is told in full how far it is
    assert [c["state"] for c in record.checks["candidates"]] == ["serving", "differs"]
    assert record.checks["candidates"][1]["max_rel_error"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.exhaustive
async def test_a_damaged_verdict_is_ignored(start: Callable[..., Any], tmp_path: Path) -> None:
    _, compared = await start()
    (file,) = (tmp_path / ".verdicts").iterdir()
    for damage in ("", "{", "[]", "[{}, {}]", '[{"backend": "eager", "rows": 3}, {"backend": "x"}]'):
        file.write_text(damage)
        record, again = await start()  # which writes a whole one
        assert (record.backend, again) == ("openvino", compared), damage


@pytest.mark.exhaustive
async def test_a_verdict_is_of_what_it_was_measured_with(start: Callable[..., Any]) -> None:
    _, compared = await start()
    for settings in ({"compute_threads": 3}, {"max_batch": 1}, {"cache_dir": None}):
        _, again = await start(**settings)
        assert again == compared, settings


async def test_what_is_worse_is_not_kept(start: Callable[..., Any], tmp_path: Path) -> None:
    await start("differs")
    assert not (tmp_path / ".verdicts").exists()


async def test_old_verdicts_go(start: Callable[..., Any], tmp_path: Path) -> None:
    record, _ = await start()
    (mine,) = (tmp_path / ".verdicts").iterdir()
    for number in range(KEPT):
        (tmp_path / ".verdicts" / f"{number}.json").write_text("[]")
    verdicts = Verdicts(Settings(device="cpu", max_batch=2, cache_dir=tmp_path))
    verdicts.write(record.description, *verdicts.read(record.description, "openvino"))
    assert len(list((tmp_path / ".verdicts").iterdir())) == KEPT
    assert mine.exists()
