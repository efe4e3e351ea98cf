"""The client of KServe's own SDK, where it is installed: its pins do not go with ours, so the test extra lacks it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

kserve = pytest.importorskip("kserve")

SPEC = {
    "model": "resnet18",
    "weights": "random",
    "return_nodes": {"layer3": "C4", "layer4": "C5"},
    "name": "r18-kserve",
}


def ask(server: Any, *inputs: Any, **request: Any) -> Any:
    """The answer to one request, and whether live, ready and the model ready."""
    server.http.post("/v1/extractors", json=SPEC).raise_for_status()

    async def run() -> Any:
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", retries=0, timeout=120))
        try:
            assert await client.is_server_live(server.url)
            assert await client.is_server_ready(server.url)
            assert await client.is_model_ready(server.url, "r18-kserve")
            assert not await client.is_model_ready(server.url, "nobody")
            return await client.infer(
                server.url,
                kserve.InferRequest("r18-kserve", list(inputs), **request),
                model_name=request.get("model_name", "r18-kserve"),
            )
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("binary", [True, False])
def test_tensors(server: Any, binary: bool) -> None:
    x = np.random.default_rng(0).random((2, 3, 224, 224), np.float32)
    given = kserve.InferInput("x", [2, 3, 224, 224], "FP32")
    given.set_data_from_numpy(x, binary_data=binary)
    response = ask(server, given)
    assert {output.name: output.shape for output in response.outputs} == {"C4": [2, 256, 14, 14], "C5": [2, 512, 7, 7]}
    assert response.outputs[0].as_numpy().dtype == np.float32


@pytest.mark.parametrize("binary", [True, False])
def test_encoded_images(server: Any, binary: bool, photos: dict[str, bytes], reference: Any) -> None:
    from kserve.protocol.infer_type import RequestedOutput

    photo = photos["chelsea"]
    given = kserve.InferInput("image", [1], "BYTES")
    data = np.array([photo if binary else base64.b64encode(photo).decode()], dtype=object)
    given.set_data_from_numpy(data, binary_data=binary)
    response = ask(server, given, request_outputs=[RequestedOutput("C5", {"binary_data": True})])
    [output] = response.outputs
    expected = reference("resnet18", "layer4.1.relu_1", [photo]).numpy()
    np.testing.assert_allclose(output.as_numpy(), expected, rtol=1e-4, atol=1e-4)
