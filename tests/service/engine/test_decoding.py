"""Which thread decodes."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from service.engine import FeatureOptions
from tests.service.engine.running import MakeEngine, Watched, built, tensors, waiting

pytestmark = pytest.mark.anyio


async def test_who_decodes(engine: MakeEngine, jpegs: list[bytes]) -> None:
    """An idle device worker decodes what it would wait for; decoders the rest, and all of it while it is busy."""
    seen: list[str] = []
    async with engine(decode_threads=1) as running:
        record = await built(running)
        watched = Watched(record)
        decode = record.decoder.image

        def noted(*args: Any) -> torch.Tensor:
            seen.append(threading.current_thread().name)
            return decode(*args)

        record.decoder.image = noted  # type: ignore[method-assign]
        fast = FeatureOptions(preprocess="fast")

        async def idle() -> None:
            while not running._queue._idle:
                await asyncio.sleep(0.01)

        await idle()
        await running.features(record, jpegs[:1], fast)
        assert seen == ["fxserve-cpu"]
        seen.clear()
        watched.entered.clear()
        watched.open.clear()
        held = asyncio.create_task(running.features(record, tensors(0)))
        await watched.begun()
        busy = asyncio.create_task(running.features(record, jpegs[:1], fast))
        await waiting(running, 1)
        watched.open.set()
        await asyncio.gather(held, busy)
        assert seen == ["fxserve-decode-0"]
        seen.clear()
        await idle()
        await running.features(record, jpegs[:2], fast)
        assert sorted(seen) == ["fxserve-cpu", "fxserve-decode-0"]
