"""What counts as part of a request in flight, and what goes on in the background for all of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from service.engine.requests.in_flight import InFlight
from service.engine.tasks import background
from service.observability import logs
from tests.service.engine.running import PATIENCE, MakeEngine, spec

pytestmark = pytest.mark.anyio


async def test_each_counts_its_own_blocks_without_background_work() -> None:
    one, other = InFlight(), InFlight()

    async def included() -> bool:
        return one.includes_caller

    with one:
        assert one.includes_caller
        assert not other.includes_caller
        assert await asyncio.create_task(included())
        later = background(included(), "included")
    assert not await later


async def test_a_build_logs_under_no_request(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made for whoever asks for it, of whom the first may be answered long before."""
    seen: list[str | None] = []

    class Seeing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(logs.request_id.get())

    def fail(*given: Any, **options: Any) -> None:
        raise LookupError("nobody thought of this")

    monkeypatch.setattr("service.engine.memory.building.build_extractor", fail)
    handler = Seeing()
    logging.getLogger("fxserve.extractors").addHandler(handler)
    entered = logs.request_id.set("first")
    try:
        async with engine() as running:
            await running.extractor(spec(), PATIENCE)
    finally:
        logs.request_id.reset(entered)
        logging.getLogger("fxserve.extractors").removeHandler(handler)
    assert seen == [None]
