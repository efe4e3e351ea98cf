"""The service in this process: requests go through ASGI, without a socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from fxcore.graph.model_graph import forget_graph, kept_graphs
from service.app import create_app
from service.settings import Settings


class Client:
    """A started service and a client for it, for tests that are not async."""

    def __init__(self, **settings: Any) -> None:
        self.app = create_app(Settings(**{"lowering": False, **settings}))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.run(self._lifespan.__aenter__())
        engine = self.app.state.fxserve.engine
        while engine.readiness()[1] == "the service is starting":
            time.sleep(0.01)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=600)

    def run(self, work: Any) -> Any:
        """Await ``work`` on the service's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=600)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.http.get(path, **options))

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.http.post(path, **options))

    def delete(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.http.delete(path, **options))

    @contextmanager
    def builders_busy(self) -> Iterator[None]:
        """Keep all build threads busy within the block, so that nothing is traced or built."""
        engine, free = self.app.state.fxserve.engine, threading.Event()
        for _ in range(engine.settings.build_threads):
            engine.threads.builders.submit(free.wait, 120)
        while not engine.threads.builders._work_queue.empty():
            time.sleep(0.01)
        try:
            yield
        finally:
            free.set()

    def close(self) -> None:
        self.run(self.http.aclose())
        self.run(self._lifespan.__aexit__(None, None, None))
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _end_tasks(self) -> None:
        """Cancel what is left on the event loop, as :func:`asyncio.run` does."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 60)


def checked(client: Client, id: str) -> dict[str, Any]:
    """Return the checks of an extractor once its errors are measured."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        checks: dict[str, Any] = client.get(f"/v1/extractors/{id}").json()["checks"]
        if None not in (checks["candidates"][0]["max_abs_error"], checks["max_abs_error"]):
            return checks
        time.sleep(0.02)
    raise AssertionError("its errors were not measured")


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """A service with default settings, shared by all tests."""
    client = Client()
    yield client
    client.close()


@pytest.fixture
def make_client() -> Iterator[Callable[..., Client]]:
    """Start a service with a test's own settings: ``make_client(max_body_bytes=1000)``."""
    made: list[Client] = []

    def make(**settings: Any) -> Client:
        made.append(Client(**settings))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def no_graphs() -> None:
    """Drop the graphs that other tests traced, since they count towards the memory budget."""
    for graph in kept_graphs():
        forget_graph(graph)
