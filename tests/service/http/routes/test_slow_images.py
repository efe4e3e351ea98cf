"""Every route that computes refuses images that would take far longer than their deadline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import httpx
import pytest

from service.engine.runtime.pace import Pace
from tests.service.conftest import Client
from tests.wire import b64, created, sent

MODEL = "squeezenet1_1"
FEATURES = f"/v1/models/{MODEL}/features?weights=random&nodes=classifier.1&pool=avg"
ATTRIBUTIONS = f"/v1/models/{MODEL}/attributions?weights=random&of=flatten&method=gradient&target=1"


def asked(client: Client, route: str, photo: bytes, headers: Mapping[str, str]) -> httpx.Response:
    if route == "embeddings":
        body = {"model": f"{MODEL}@random:classifier.1", "input": b64(photo)}
        return client.post("/v1/embeddings", json=body, headers=headers)
    if route == "infer":
        inputs = [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [b64(photo)]}]
        outputs = [{"name": "classifier.1"}]
        return client.post("/v2/models/slow/infer", json={"inputs": inputs, "outputs": outputs}, headers=headers)
    path = {
        "features": FEATURES,
        "values of an attribution": f"{ATTRIBUTIONS}&at=features.12",
        "passes of an attribution": f"{ATTRIBUTIONS}&at=features.0",
    }[route]
    return client.post(path, **sent(photo, **headers))


@pytest.fixture(scope="module")
def slow() -> Iterator[Client]:
    """A whole image took it 400 s: one up to features.12 takes 300 s, and one up to features.0 takes 25 s."""
    client = Client(request_timeout=10_000)
    created(client, model=MODEL, weights="random", return_nodes=["classifier.1"], name="slow")
    [pace] = client.app.state.fxserve.engine.runtimes._builder.paces.values()
    flops = client.get(f"/v1/models/{MODEL}/graph?format=json").json()["totals"]["flops"]
    for _ in range(3):
        pace.add(400.0, flops, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "add", lambda *batch: None)  # the model is faster than that
        yield client
    client.close()


@pytest.mark.parametrize(
    "route", ["features", "embeddings", "infer", "values of an attribution", "passes of an attribution"]
)
def test_each_route_knows_its_deadline(slow: Client, photos: Mapping[str, bytes], route: str) -> None:
    late = asked(slow, route, photos["chelsea"], {"x-request-timeout": "60"})
    assert late.status_code == 504, late.text
    shape = "64 x 111 x 111" if route.startswith("passes") else "3 x 224 x 224"
    assert f"{shape} would take about" in late.text
    answered = asked(slow, route, photos["chelsea"], {"x-request-timeout": "1000"})
    assert answered.status_code == 200, answered.text
