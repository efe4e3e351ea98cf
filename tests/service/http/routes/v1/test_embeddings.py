"""``POST /v1/embeddings``; OpenAI's own client is tested in tests/e2e."""

from __future__ import annotations

import pytest

from tests.service.conftest import Client
from tests.wire import b64


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
