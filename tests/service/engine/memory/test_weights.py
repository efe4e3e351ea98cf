"""Loaded weights."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fxcore.errors import WeightsUnavailable
from fxcore.models.catalog import get_model
from service.engine.memory import weights
from service.engine.memory.weights import ModelStore

pytestmark = pytest.mark.anyio


async def test_a_model_stays_loaded_if_a_waiter_is_cancelled_as_it_arrives() -> None:
    entry = get_model("squeezenet1_1")
    key = (entry.name, "random", "float32")
    with ThreadPoolExecutor(1) as pool:
        models = ModelStore(torch.device("cpu"), None, pool, pool)
        waiter = asyncio.create_task(models.get(entry, key))
        await asyncio.sleep(0)
        [load] = [task for task in asyncio.all_tasks() if task.get_name().endswith("load")]
        load.add_done_callback(lambda _: waiter.cancel())
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert models.loaded() == {key: load.result()}
        assert await models.get(entry, key) is load.result()


async def test_a_load_that_failed_while_nobody_waited_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = get_model("squeezenet1_1")
    key = (entry.name, "random", "float32")
    failing = threading.Event()

    def fail(*args: object) -> object:
        failing.wait()
        raise WeightsUnavailable("no network")

    with ThreadPoolExecutor(1) as pool:
        models = ModelStore(torch.device("cpu"), None, pool, pool)
        with monkeypatch.context() as patched:
            patched.setattr(weights, "load_model", fail)
            waiter = asyncio.create_task(models.get(entry, key))
            await asyncio.sleep(0)
            [load] = [task for task in asyncio.all_tasks() if task.get_name().endswith("load")]
            waiter.cancel()
            failing.set()
            await asyncio.wait({load})
            assert isinstance(load.exception(), WeightsUnavailable)
        assert (await models.get(entry, key)).module is not None
