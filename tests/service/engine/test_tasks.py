"""Values that are made once for all who wait for them."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from service.engine.tasks import SingleFlight

pytestmark = pytest.mark.anyio


class Refused(Exception):
    pass


class Maker:
    """Make numbers, each once ``open`` is set; ``error`` is raised instead."""

    def __init__(self) -> None:
        self.open, self.error, self.made = asyncio.Event(), False, 0

    async def __call__(self) -> int:
        self.made += 1
        number = self.made
        await self.open.wait()
        if self.error:
            raise Refused
        return number


async def test_a_value_is_made_once_even_if_who_asked_first_leaves() -> None:
    shared, make = SingleFlight[str, int]("some"), Maker()
    waiters = [asyncio.ensure_future(shared.get("a", make)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    assert (shared.making, shared.made) == (["a"], {})
    make.open.set()
    assert await asyncio.gather(*waiters[1:]) == [1, 1]
    assert (shared.making, shared.made) == ([], {"a": 1})
    assert await shared.get("a", make) == 1
    assert shared.forget("a")
    assert not shared.forget("a")
    assert await shared.get("a", make) == 2


async def test_what_is_dropped_while_it_is_made_goes_to_its_waiters_only() -> None:
    shared, make, later = SingleFlight[str, int]("some"), Maker(), Maker()
    later.made = 5
    first = shared.get("a", make)
    assert shared.forget("a")
    second = shared.get("a", later)
    make.open.set()
    assert await first == 1
    assert (shared.making, shared.made) == (["a"], {})
    later.open.set()
    assert await second == 6
    assert shared.made == {"a": 6}


async def test_what_failed_is_made_again_and_its_error_is_kept_by_nobody() -> None:
    shared, make = SingleFlight[str, int]("some"), Maker()
    make.error = True
    make.open.set()
    gc.collect()
    gc.disable()
    try:
        try:
            await shared.get("a", make)
        except Refused as error:
            gone = weakref.ref(error)
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()
    make.error = False
    assert await shared.get("a", make) == 2


async def test_what_is_not_kept_is_forgotten_once_all_who_wait_have_it() -> None:
    shared, make = SingleFlight[str, int]("some", keep=False), Maker()
    waiters = [asyncio.ensure_future(shared.get("a", make)) for _ in range(3)]
    await asyncio.sleep(0)
    assert shared.making == ["a"]
    make.open.set()
    assert await asyncio.gather(*waiters) == [1, 1, 1]
    assert (shared.making, shared.made) == ([], {})
    assert not shared.forget("a")
    assert await shared.get("a", make) == 2
