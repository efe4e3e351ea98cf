"""A server on CUDA answers what a server on the CPU answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from tests.service.conftest import Client

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

JPEG, NPY, JSON = "image/jpeg", "application/x-npy", "application/json"
FEATURES = "/v1/models/{model}/features?weights=random&nodes={nodes}"


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Client, Client]]:
    """On the CPU, and on CUDA."""
    clients = Client(device="cpu", preprocess="pil"), Client(device="cuda", preprocess="pil")
    yield clients
    for client in clients:
        client.close()


def npy(*shape: int) -> bytes:
    body = io.BytesIO()
    np.save(body, np.random.default_rng(0).random(shape, np.float32))
    return body.getvalue()


def same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], limit: float) -> None:
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert (value.shape, value.dtype) == (found[key].shape, found[key].dtype)
        one, other = value.double().flatten(), found[key].double().flatten()
        assert (one - other).abs().max() <= limit * one.abs().max().clamp(min=1e-6), key


def resnet(query: str = "") -> str:
    return FEATURES.format(model="resnet18", nodes="layer2,layer4") + query


def vit(query: str = "") -> str:
    return FEATURES.format(model="vit_b_32", nodes="encoder.layers.encoder_layer_5") + query


CASES = {
    "maps": resnet(),
    "pooled": resnet("&pool=avg"),
    "gem": resnet("&pool=gem&normalize=l2"),
    "float16": resnet("&dtype=float16"),
    "projected": resnet("&pool=avg&project=32"),
    "projected maps": resnet("&project=8"),
    "native": resnet("&fit=native"),
    "padded": resnet("&fit=pad"),
    "another size": resnet("&image_size=320"),
    "tokens": vit(),
    "class token": vit("&pool=cls"),
    "chosen tokens": vit("&tokens=0,3,7"),
    "vit of another size": vit("&image_size=384"),
    "swin": FEATURES.format(model="swin_t", nodes="features.3,features.7") + "&pool=avg",
    "detection": FEATURES.format(model="ssdlite320_mobilenet_v3_large", nodes="backbone.features.0.12"),
}


@pytest.mark.parametrize("case", CASES)
def test_photographs(case: str, both: tuple[Client, Client], photos: dict[str, bytes]) -> None:
    headers = {"content-type": JPEG, "accept": "application/x-safetensors"}
    one, other = (client.post(CASES[case], content=photos["chelsea"], headers=headers) for client in both)
    assert (one.status_code, other.status_code) == (200, 200), (one.text[:500], other.text[:500])
    same(load(one.content), load(other.content), 2e-3 if case == "float16" else 1e-3)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_precisions(precision: str, both: tuple[Client, Client], photos: dict[str, bytes]) -> None:
    headers = {"content-type": JPEG, "accept": "application/x-safetensors"}
    one = both[0].post(resnet(), content=photos["coffee"], headers=headers)
    other = both[1].post(resnet(f"&precision={precision}"), content=photos["coffee"], headers=headers)
    assert (one.status_code, other.status_code) == (200, 200), other.text
    found = load(other.content)
    for key, value in load(one.content).items():
        assert torch.cosine_similarity(value.flatten(), found[key].float().flatten(), 0) > 0.999


def test_batches_of_several_clients(both: tuple[Client, Client], photos: dict[str, bytes]) -> None:
    """Of mixed options, at once."""
    headers = {"content-type": JPEG, "accept": "application/x-safetensors"}
    queries = ["", "&pool=avg", "&dtype=float16", "&pool=max"] * 8

    async def all_of(client: Client) -> list[Any]:
        asked = (
            client.http.post(resnet(query), content=list(photos.values())[i % 3], headers=headers)
            for i, query in enumerate(queries)
        )
        return await asyncio.gather(*asked)

    for one, other in zip(*(client.run(all_of(client)) for client in both), strict=True):
        assert (one.status_code, other.status_code) == (200, 200), other.text
        same(load(one.content), load(other.content), 2e-3)


POOLINGS = {"boxes": "&pool=roi", "points": "&pool=points", "masks": "&pool=mask"}
BODIES = {
    "boxes": {"boxes": [[[10, 20, 200, 210], [150, 50, 220, 160]]]},
    "points": {"points": [[[100, 120], [200.5, 140]]]},
    "masks": {"masks": [[{"size": [300, 451], "counts": [1000, 50_000, 84_300]}]]},
    "edits": {"edits": [{"node": "layer1", "channels": [0, 5], "scale": 0.0}, {"node": "layer3", "shift": 0.5}]},
}


@pytest.mark.parametrize("case", BODIES)
def test_json_bodies(case: str, both: tuple[Client, Client], photos: dict[str, bytes]) -> None:
    body = {"images": [base64.b64encode(photos["chelsea"]).decode()], **BODIES[case]}
    headers = {"accept": "application/x-safetensors"}
    one, other = (client.post(resnet(POOLINGS.get(case, "")), json=body, headers=headers) for client in both)
    assert (one.status_code, other.status_code) == (200, 200), (one.text[:500], other.text[:500])
    same(load(one.content), load(other.content), 1e-3)


@pytest.mark.parametrize("method", ["gradcam", "integrated_gradients", "gradient"])
def test_attributions(method: str, both: tuple[Client, Client], photos: dict[str, bytes]) -> None:
    path = f"/v1/models/resnet18/attributions?weights=random&of=fc&target=5&at=layer4&method={method}"
    headers = {"content-type": JPEG, "accept": "application/x-safetensors"}
    one, other = (client.post(path, content=photos["chelsea"], headers=headers) for client in both)
    assert (one.status_code, other.status_code) == (200, 200), (one.text[:500], other.text[:500])
    same(load(one.content), load(other.content), 1e-2)


def test_inner_nodes(both: tuple[Client, Client]) -> None:
    path = FEATURES.format(model="resnet18", nodes="layer4") + "&inputs=layer2"
    headers = {"content-type": NPY, "accept": "application/x-safetensors"}
    one, other = (client.post(path, content=npy(3, 128, 28, 28), headers=headers) for client in both)
    assert (one.status_code, other.status_code) == (200, 200), other.text
    same(load(one.content), load(other.content), 1e-3)


def test_embeddings(both: tuple[Client, Client], photos: dict[str, bytes]) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(photos["rocket"]).decode()
    body = json.dumps({"model": "resnet18@random:layer4", "input": url})
    headers = {"content-type": JSON}
    one, other = (client.post("/v1/embeddings", content=body, headers=headers) for client in both)
    assert (one.status_code, other.status_code) == (200, 200), other.text
    first, second = (torch.tensor(answer.json()["data"][0]["embedding"]) for answer in (one, other))
    assert torch.cosine_similarity(first, second, 0) > 0.9999


def test_int8_is_refused_with_what_there_is(both: tuple[Client, Client], photos: dict[str, bytes]) -> None:
    answer = both[1].post(resnet("&precision=int8"), content=photos["rocket"], headers={"content-type": JPEG})
    assert answer.status_code == 422
    assert "float16" in answer.text


def test_profile_and_metrics(both: tuple[Client, Client], photos: dict[str, bytes]) -> None:
    made = both[1].post(
        "/v1/extractors?wait=60", json={"model": "resnet18", "weights": "random", "return_nodes": ["layer4"]}
    )
    found = both[1].get(f"/v1/extractors/{made.json()['id']}/graph?profile=true")
    assert found.status_code == 200, found.text
    metrics = both[1].get("/metrics").text
    assert 'fxserve_gpu_memory_allocated_bytes{device="cuda:0"}' in metrics
