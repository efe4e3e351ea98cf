"""Where bodies are parsed."""

from __future__ import annotations

from typing import Any

import pytest

from service.codecs.requests import bodies


@pytest.mark.anyio
@pytest.mark.parametrize(("megabytes", "threads"), [(0.5, 0), (2, 1)])
async def test_a_large_image_is_joined_off_the_event_loop(megabytes: float, threads: int) -> None:
    given: list[Any] = []

    async def run_in_pool(function: Any, *args: Any) -> bodies.Sent:
        given.append(function)
        return function(*args)

    chunks = [bytes([number]) * 65536 for number in range(int(megabytes * 16))]
    sent = await bodies.Body("image/jpeg", chunks).parse("x", run_in_pool)
    assert sent.inputs == [b"".join(chunks)]
    assert len(given) == threads
