"""Real photographs, small real models, and an engine that runs for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import skimage.data

from fxcore.backends import BACKENDS
from service.engine import Engine
from service.engine.runtime.candidate import Candidate
from service.settings import Settings
from tests.service.engine.fake_backends import Broken, Held
from tests.service.engine.running import MakeEngine, encoded


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def arrays() -> dict[str, np.ndarray]:
    """Photographs as uint8 [H, W, 3], by name."""
    return {name: getattr(skimage.data, name)() for name in ("chelsea", "coffee", "rocket")}


@pytest.fixture(scope="session")
def jpegs(arrays: dict[str, np.ndarray]) -> list[bytes]:
    return [encoded(pixels) for pixels in arrays.values()]


@pytest.fixture(scope="session")
def large_jpegs(arrays: dict[str, np.ndarray]) -> list[bytes]:
    """JPEG files large enough to be decoded at half size."""
    return [encoded(np.kron(pixels, np.ones((3, 3, 1), np.uint8))) for pixels in arrays.values()]


@pytest.fixture
def engine() -> MakeEngine:
    """Run an engine with some settings on the CPU: ``async with engine(max_inflight=3) as running:``."""

    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[Engine]:
        # No background lowering in the middle of a test, unless the test is about it.
        running = Engine(Settings(**{"device": "cpu", "lowering": False, "cache_dir": None, **settings}))
        await running.start()
        try:
            yield running
        finally:
            await running.close(grace=20)

    return make


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that replaces OpenVINO and takes over wherever it is tried."""
    monkeypatch.setitem(BACKENDS, "openvino", Broken("none"))
    monkeypatch.setattr(Candidate, "judge", lambda self, other: True)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """A backend that replaces OpenVINO and lowers on request; released when the test ends."""
    held = Held()
    monkeypatch.setitem(BACKENDS, "openvino", held)
    yield held
    held.open.set()
