"""What requests get that were accepted before the service began to shut down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from service.engine import Engine
from tests.service.conftest import Client
from tests.wire import refused, sent

SPEC = {"model": "squeezenet1_1", "weights": "random", "return_nodes": ["features.3"]}
ONE_STEP = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.3&pool=avg"


async def under_way(engine: Engine, client: Client, path: str, **options: Any) -> asyncio.Task[httpx.Response]:
    """A request that waits for a builder."""
    asked = asyncio.create_task(client.http.post(path, **options))
    async with asyncio.timeout(50):
        while engine.threads.builders._work_queue.empty():
            await asyncio.sleep(0.01)
    return asked


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("path", "status"),
    [(ONE_STEP, 200), ("/v1/extractors", 201), ("/v2/models/squeezenet1_1/infer", 200)],
    ids=["features", "extractors", "infer"],
)
def test_what_waits_for_its_extractor_is_finished(
    make_client: Callable[..., Client], photos: dict[str, bytes], path: str, status: int
) -> None:
    client = make_client()
    engine = client.app.state.fxserve.engine
    values = {"name": "x", "datatype": "FP32", "shape": [1, 3, 64, 64], "data": [0.0] * 3 * 64 * 64}
    v2 = {"inputs": [values], "outputs": [{"name": "features.3"}], "parameters": {"weights": "random"}}
    options = {ONE_STEP: sent(photos["chelsea"]), "/v1/extractors": {"json": SPEC}}.get(path, {"json": v2})

    async def told_to_end() -> httpx.Response:
        with client.builders_busy():
            asked = await under_way(engine, client, path, **options)
            drained = asyncio.create_task(engine.drain())
            await asyncio.wait({asked, drained}, timeout=0.3)
            assert not drained.done()
            refused(await client.http.post(ONE_STEP, **sent(b"x")), "draining", status=503)
        response = await asked
        await asyncio.wait_for(drained, 60)
        return response

    response = client.run(told_to_end())
    assert response.status_code == status, response.text


def test_cancelled_requests_get_a_503(make_client: Callable[..., Client], photos: dict[str, bytes]) -> None:
    """A server cancels what is left when it ends."""
    client = make_client(cors_origins=("https://lab.example",))
    engine = client.app.state.fxserve.engine

    async def ended() -> httpx.Response:
        with client.builders_busy():
            headers = {"x-request-id": "abc-1", "origin": "https://lab.example"}
            asked = await under_way(engine, client, ONE_STEP, **sent(photos["chelsea"], **headers))
            began = time.monotonic()
            await engine.drain(0.2)
            assert time.monotonic() - began >= 0.2
            asked.cancel()
            return await asked

    response = client.run(ended())
    refused(response, "draining", status=503)
    assert response.headers["x-request-id"] == "abc-1"
    assert response.headers["access-control-allow-origin"] == "https://lab.example"
    assert int(response.headers["retry-after"]) >= 1
