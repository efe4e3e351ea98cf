"""Builds that end when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.engine.backends.upgrade import Upgrade
from tests.service.engine.running import PATIENCE, MakeEngine, spec

pytestmark = pytest.mark.anyio


async def test_a_build_ends_with_its_engine(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def held(*args: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Upgrade, "first", held)
    async with engine() as running:
        record, _ = await running.extractors.get(spec())
        build = record.build
        assert build is not None
        await begun.wait()
    await asyncio.wait({build}, timeout=PATIENCE)
    assert build.cancelled()
    assert "closed" in record.failure.detail
