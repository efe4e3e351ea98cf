"""What is decoded at a time, and whose headers are read when."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

from fxcore.images.files import Header, image_header
from service.engine.requests.plan import tensors as tensor_plan
from tests.service.engine.running import PATIENCE, MakeEngine, built, encoded, tensors, until

pytestmark = pytest.mark.anyio


@pytest.mark.exhaustive
@pytest.mark.parametrize(("limit", "at_once"), [(2 * 1024**3, 4), (64 * 1024**2, 1)])
async def test_what_is_decoded_at_a_time_is_claimed(engine: MakeEngine, limit: int, at_once: int) -> None:
    """PNG files of a thousandth of their pixels, of which each takes 16 MB decoded."""
    image = encoded(np.zeros((2000, 2000, 3), dtype=np.uint8), "PNG")
    decoding = 0
    seen: list[tuple[int, int]] = []
    together = threading.Barrier(at_once)
    guard = threading.Lock()
    async with engine(decode_threads=4, max_inflight_bytes=limit) as running:
        record = await built(running)
        decode = record.description.decoder.image

        def noted(*args: Any) -> torch.Tensor:
            nonlocal decoding
            row = decode(*args)
            with guard:
                decoding += 1
            together.wait(PATIENCE)  # each has its image now
            with guard:
                seen.append((decoding, running.admission.bytes))
            together.wait(PATIENCE)
            with guard:
                decoding -= 1
            return row

        record.description.decoder.image = noted  # type: ignore[method-assign]
        await running.features(record, [image] * 8)
    assert [count for count, _ in seen] == [at_once] * 8
    for count, claimed in seen:
        assert count * 4 * 2000 * 2000 <= claimed <= limit


@pytest.mark.exhaustive
async def test_headers_of_several_requests_are_read_by_turns(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may have thousands of pieces, and a request a thousand files: nobody else waits for all of them."""
    many = [encoded(np.zeros((8, 8 + number, 3), dtype=np.uint8), "PNG") for number in range(64)]
    one = encoded(np.zeros((16, 16, 3), dtype=np.uint8), "PNG")
    order: list[bytes] = []
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def noted(data: bytes, max_pixels: int | None = None) -> Header:
        order.append(data)
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(PATIENCE)
        return image_header(data, max_pixels)

    monkeypatch.setattr("service.engine.requests.plan.images.image_header", noted)
    async with engine() as running:
        record = await built(running)
        first = asyncio.create_task(running.features(record, many))
        await begun.wait()
        second = asyncio.create_task(running.features(record, [one]))
        await until(running.threads.intake._work_queue.qsize)
        go_on.set()
        await asyncio.gather(first, second)
    assert order.index(one) == 8


@pytest.mark.parametrize(
    ("inputs", "on_loop"),
    [
        (tensors(1.0), True),
        (tensors(1.0, 2.0, 3.0), False),  # large
        ({"x": torch.zeros(1, 64, 64, 3, dtype=torch.uint8)}, False),  # resized
    ],
)
async def test_only_a_small_tensor_is_converted_on_the_event_loop(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, torch.Tensor], on_loop: bool
) -> None:
    prepared = tensor_plan._prepared
    threads: list[threading.Thread] = []

    def noted(*args: Any) -> torch.Tensor:
        threads.append(threading.current_thread())
        return prepared(*args)

    monkeypatch.setattr(tensor_plan, "_prepared", noted)
    async with engine() as running:
        await running.features(await built(running), inputs)
    assert [thread is threading.current_thread() for thread in threads] == [on_loop]
