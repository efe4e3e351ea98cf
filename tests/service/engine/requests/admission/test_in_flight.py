"""What counts as part of a request in flight, and what goes on in the background for all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.observability import logs
from tests.service.engine.running import PATIENCE, MakeEngine, built, spec, tensors

pytestmark = pytest.mark.anyio


async def test_an_accepted_request_goes_on_while_the_engine_drains(engine: MakeEngine) -> None:
    """What it needs may have to be built first."""
    async with engine() as running:
        record = await built(running)
        with running.in_flight:
            draining = asyncio.create_task(running.drain())
            await asyncio.sleep(0)
            assert (await running.features(record, tensors(1))).images == 1
            other, _ = await running.extractors.get(spec(nodes=["features.3"]), PATIENCE)
            assert other.state == "ready"
            assert not draining.done()
        await asyncio.wait_for(draining, PATIENCE)


async def test_a_build_logs_under_its_own_name(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made for whoever asks for it, of whom the first may be answered long before."""

    def fail(*given: Any, **options: Any) -> None:
        raise LookupError("nobody thought of this")

    monkeypatch.setattr("service.engine.lifecycle.building.build_extractor", fail)
    monkeypatch.setattr(caplog.handler, "formatter", logs.TextLines())
    entered = logs.request_id.set("first")
    try:
        async with engine() as running:
            await running.extractors.get(spec(), PATIENCE)
    finally:
        logs.request_id.reset(entered)
    assert "fxserve.extractors [fxserve-build] building extractor" in caplog.text
