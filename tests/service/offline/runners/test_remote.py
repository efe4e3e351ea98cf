"""How many images a server gets at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from service.client import AsyncClient, exceptions
from service.offline.runners import remote


@asynccontextmanager
async def answering(sent: list[int], late: set[int]) -> AsyncIterator[remote._Server]:
    """A server that is late with the requests of these numbers, and how many images each request has."""

    async def answer(images: Sequence[bytes], **options: Any) -> dict[str, torch.Tensor]:
        number = len(sent)
        sent.append(len(images))
        await asyncio.sleep(0)
        if number in late:
            raise exceptions.DeadlineExceeded(1.0)
        return {"C5": torch.ones(len(images), 2)}

    async with AsyncClient("http://127.0.0.1:1") as client:
        server = remote._Server(client)
        server.extractor = answer  # type: ignore[assignment]
        yield server


def test_a_server_that_was_late_gets_whole_batches_again() -> None:
    sent: list[int] = []

    async def run() -> None:
        async with answering(sent, late={0, 1}) as server:
            for _ in range(40):
                rows = await server.features([b""] * 16, None, {"pool": "avg"})
                assert rows["C5"].shape == (16, 2)

    asyncio.run(run())
    assert sent[:4] == [16, 8, 4, 4]
    # 32 requests of 4 images, as many of 8 and of 16, and then whole batches, concurrent with others
    assert [sent[2:].count(size) for size in (4, 8)] == [32, 32]
    assert sent[-1] == 16


def test_a_server_recovers_again_after_one_with_batches_waiting() -> None:
    """Some of the batches that wait go as a whole."""
    sent: list[int] = []
    late = set(range(41))

    async def run() -> None:
        async with answering(sent, late) as server:
            first = server.timeout
            await asyncio.gather(*(server.features([b""] * 16, None, {"pool": "avg"}) for _ in range(41)))
            assert server.timeout == 2 * first  # although 41 requests were late
            assert server._max_images is None
            late.add(len(sent))
            for _ in range(60):
                await server.features([b""] * 16, None, {"pool": "avg"})
            assert server._max_images is None

    asyncio.run(run())
    assert sent[-1] == 16
