"""``POST /v1/embeddings``; OpenAI's own client is tested in tests/e2e."""

from __future__ import annotations

import pytest

from service.codecs import embeddings
from tests.hostile_images import photo, saved
from tests.service.conftest import Client
from tests.wire import b64, created


def test_null_is_an_option_that_is_not_given(client: Client, photos: dict[str, bytes]) -> None:
    """Clients in other languages write all fields of a request."""
    body = {"model": "resnet18@random:avgpool", "input": b64(photos["chelsea"])}
    response = client.post("/v1/embeddings", json={**body, "encoding_format": None, "dimensions": None, "user": None})
    assert response.status_code == 200, response.text
    [found], [plain] = response.json()["data"], client.post("/v1/embeddings", json=body).json()["data"]
    assert len(found["embedding"]) == 512
    assert found["embedding"] == pytest.approx(plain["embedding"], rel=1e-5)
    refused = client.post("/v1/embeddings", json={**body, "encoding_format": "hex"}).json()["error"]
    assert refused["message"] == "field 'encoding_format': Input should be 'float' or 'base64'"


def test_many_vectors_are_written_in_a_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their heads take longer than the few values of each."""
    made = created(client, model="resnet18", weights="random", return_nodes=["avgpool"], image_size=32)
    image, engine = b64(saved(photo(size=(32, 32)), "JPEG")), client.app.state.fxserve.engine
    in_thread, run = [], engine.run_in_encoder
    monkeypatch.setattr(engine, "run_in_encoder", lambda *work: in_thread.append(work[0]) or run(*work))
    for images, written in ((2, False), (256, True)):
        in_thread.clear()
        body = {"model": made["id"], "input": [image] * images, "dimensions": 8}
        response = client.post("/v1/embeddings", json=body)
        assert [len(one["embedding"]) for one in response.json()["data"]] == [8] * images
        assert (embeddings.write in in_thread) is written
