"""Builds that end when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.engine.backends.upgrade import Upgrades
from tests.service.engine.running import MakeEngine, spec

pytestmark = pytest.mark.anyio


async def test_a_build_may_end_after_its_engine(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, begun, closed = Upgrades.first, asyncio.Event(), asyncio.Event()

    async def held(*args: Any) -> None:
        await first(*args)
        begun.set()
        await closed.wait()

    monkeypatch.setattr(Upgrades, "first", held)
    async with engine() as running:
        record, _ = await running.extractor(spec())
        build = record.build
        assert build is not None
        await begun.wait()
    closed.set()
    await build
    assert record.state == "ready"
