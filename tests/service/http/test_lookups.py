"""Slow GET requests: what those that find no place are told."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import pytest

from service.engine.threads import Pool
from service.http.lookups import Lookups
from service.http.scope import Caller
from service.problems import AdmissionFull


@pytest.mark.exhaustive
@pytest.mark.anyio
async def test_retry_after_follows_the_rate_of_lookups() -> None:
    with Pool(1, "lookup") as pool:
        lookups = Lookups(60, pool, max_requests=4)
        for _ in range(20):
            async with lookups.place(Caller()) as run:
                await run(lambda: time.sleep(0.05))
        async with AsyncExitStack() as held:
            for _ in range(4):
                await held.enter_async_context(lookups.place(Caller()))
            with pytest.raises(AdmissionFull) as refused:
                await held.enter_async_context(lookups.place(Caller()))
    assert refused.value.retry_after == 1  # of the second that was busy, four lookups take less than one
