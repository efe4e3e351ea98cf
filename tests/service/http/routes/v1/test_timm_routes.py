"""timm's models over the wire."""

from __future__ import annotations

import asyncio
import base64
import difflib
import io
import threading
from pathlib import Path

import huggingface_hub
import numpy as np
import PIL.Image
import pytest
import timm
import torch
from timm.models._features_fx import get_graph_node_names

import fxcore.photos
from fxcore.models import catalog, timm_models
from service.engine.models import served
from service.http import state
from tests.fxcore.hooks import hooked
from tests.seeded import seeded

PHOTO = Path(fxcore.photos.__file__).with_name("chelsea.jpg")
SPEC = {"model": "timm.test_vit", "weights": "random", "return_nodes": {"norm": "tokens"}}


def test_they_are_counted_and_listed_by_source(client):
    whole = client.get("/v1/models").json()
    assert whole["timm"] == {"models": len(timm.list_models()), "list": "/v1/models?source=timm"}
    assert not any(model["name"].startswith("timm.") for model in whole["models"])
    listed = client.get("/v1/models?source=timm&q=dinov2").json()["models"]
    assert {m["name"] for m in listed} == {f"timm.{name}" for name in timm.list_models() if "dinov2" in name}
    assert next(m for m in listed if m["name"] == "timm.vit_small_patch14_dinov2")["weights"] == ["lvd142m"]
    assert client.get("/v1/models?source=torchvision&q=resnet18").json()["timm"] is None


def test_they_are_listed_beside_the_event_loop(client):
    """Which answers others meanwhile."""
    assert client.get("/v1/models?source=timm").status_code == 200  # which imports timm
    free = threading.Event()

    async def others():
        listing = asyncio.create_task(client.http.get("/v1/models?source=timm"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert (await client.http.get("/healthz")).status_code == 200
        waited = not listing.done()
        free.set()
        return waited, len((await listing).json()["models"])

    client.app.state.fxserve.engine.threads.listings.submit(free.wait, 120)
    assert client.run(others()) == (True, len(timm.list_models()))


@pytest.mark.exhaustive
def test_timm_is_imported_beside_the_event_loop(client, monkeypatch):
    """Which answers others meanwhile: the import takes a second, or several on a slow disk."""
    threads = []
    # As it is before timm's models are first asked for.
    monkeypatch.setattr(state, "imported", lambda: False)
    monkeypatch.setattr(catalog, "timm_models", noting(threads, catalog.timm_models))
    monkeypatch.setattr(catalog, "timm_model", noting(threads, catalog.timm_model))
    image = base64.b64encode(PHOTO.read_bytes()).decode()
    asked = [
        client.get("/v1/models"),
        client.get("/v1/models?source=timm&q=test_vit"),
        client.get("/v1/models/timm.test_vit/nodes"),
        client.get("/v2/models/timm.test_vit"),
        client.post("/v1/extractors?wait=60", json=SPEC),
        client.post("/v1/embeddings", json={"model": "timm.test_vit@random:norm", "input": image}),
    ]
    assert {response.status_code for response in asked} <= {200, 201}
    assert len(threads) >= len(asked)
    assert client.run(running_thread()) not in threads


def test_names_like_an_unknown_one_are_searched_for_beside_the_event_loop(client, make_client, monkeypatch):
    """Which answers others meanwhile: over a thousand names are compared."""
    threads = []
    assert client.get("/v1/models?source=timm").status_code == 200  # which imports timm
    monkeypatch.setattr(timm_models.difflib, "get_close_matches", noting(threads, difflib.get_close_matches))
    monkeypatch.setattr(served, "get_close_matches", noting(threads, served.get_close_matches))
    few = make_client(models=["timm.test_*"])
    asked = [
        client.get("/v1/models/timm.test_vitt/nodes"),
        client.post(
            "/v1/models/timm.test_vitt/features?nodes=norm", content=b"", headers={"content-type": "image/png"}
        ),
        client.get("/v2/models/timm.test_vitt"),
        few.get("/v1/models/timm.test_vitt/nodes"),
        few.get("/v1/models/timm.vit_tiny_patch16_224/nodes"),
    ]
    assert [response.status_code for response in asked] == [404] * len(asked)
    assert ["timm.test_vit" in response.text for response in asked] == [True] * 4 + [False]
    assert len(threads) == len(asked)
    assert not {client.run(running_thread()), few.run(running_thread())}.intersection(threads)


def noting(threads, function):
    """Return ``function``, which adds the thread of each call to ``threads``."""

    def call(*args, **options):
        threads.append(threading.current_thread())
        return function(*args, **options)

    return call


async def running_thread():
    return threading.current_thread()


@pytest.mark.exhaustive
def test_one_is_described(client):
    detail = client.get("/v1/models/timm.convnextv2_atto").json()
    assert detail["default_weights"] == "fcmae_ft_in1k"
    assert detail["preprocessing"]["crop_pct"] == timm.get_pretrained_cfg("convnextv2_atto").crop_pct
    assert detail["levels"]["C5"]["channels"] == 320
    model = timm.create_model("convnextv2_atto")
    weights = detail["weights"]
    assert weights["fcmae_ft_in1k"]["num_params"] == sum(p.numel() for p in model.parameters())
    assert {tag: weights[tag]["categories"] for tag in weights} == {"fcmae_ft_in1k": 1000, "fcmae": 0}
    nodes = client.get("/v1/models/timm.test_vit/nodes").json()
    assert nodes["eval_nodes"] == get_graph_node_names(timm.create_model("test_vit"))[1]
    assert client.get("/v1/models/timm.test_vit/graph?format=table").text.startswith("opcode")


def test_features_are_timms(client):
    data = PHOTO.read_bytes()
    made = client.post("/v1/extractors?wait=60", json=SPEC).json()
    assert made["state"] == "ready", made
    response = client.post(
        f"/v1/extractors/{made['id']}/features",
        content=data,
        headers={"content-type": "image/jpeg", "accept": "application/json"},
    ).json()["outputs"][0]
    model = seeded(timm.create_model, "test_vit")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.no_grad(), PIL.Image.open(PHOTO) as image:
        expected = model.forward_features(transform(image.convert("RGB"))[None])
    assert response["shape"] == list(expected.shape)
    assert np.allclose(np.array(response["data"]).reshape(expected.shape), expected.numpy(), atol=1e-4)


def test_windows_are_averaged_to_the_channels(client):
    """Their other axes are unknown, but not their channels."""
    name, path = "test_maxvit", "stages.0.blocks.0.attn_block.attn.proj"
    pixels = torch.rand(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    body = io.BytesIO()
    np.save(body, pixels.numpy())
    query = f"nodes={path}&weights=random&preprocess=none&pool=avg"
    headers = {"content-type": "application/x-npy", "accept": "application/x-npy"}
    response = client.post(f"/v1/models/timm.{name}/features?{query}", content=body.getvalue(), headers=headers)
    assert response.status_code == 200, response.text
    windows = hooked(seeded(timm.create_model, name), path, pixels)
    assert windows.shape == (128, 5, 5, 32)
    np.testing.assert_allclose(
        np.load(io.BytesIO(response.content)), windows.unflatten(0, (2, 64)).mean(dim=(1, 2, 3)), atol=1e-5
    )


def test_weights_that_cannot_be_had(client, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    response = client.post("/v1/models/timm.test_vit2/features?nodes=norm", content=PHOTO.read_bytes(),
                         headers={"content-type": "image/jpeg"})  # fmt: skip
    assert response.status_code == 503
    assert response.json()["file"] == "model.safetensors"
    assert response.json()["folder"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/models/timm.vit_smal_patch14_dinov2", 404, "vit_small_patch14_dinov2"),
        ("/v1/models/timm.test_vit.r160_in1k/nodes", 404, "weights"),
        ("/v1/models/timm.test_vit/nodes?weights=nope", 422, "r160_in1k"),
        ("/v2/models/timm.nothing", 404, "timm"),
        ("/v2/models/timm.test_vit", 200, "timm.test_vit"),
    ],
)
def test_names_that_are_wrong(client, path, status, says):
    response = client.get(path)
    assert response.status_code == status
    assert says in response.text


def test_patterns_say_which_are_served(make_client):
    client = make_client(models=["resnet1*", "timm.test_*"])
    listed = client.get("/v1/models").json()
    assert {m["name"] for m in listed["models"]} == {"resnet18", "resnet101", "resnet152"}
    assert listed["timm"]["models"] == len(timm.list_models("test_*"))
    assert client.get("/v1/models/timm.test_vit").status_code == 200
    assert client.get("/v1/models/timm.resnet50").status_code == 404
    assert client.post("/v1/extractors", json={**SPEC, "model": "timm.resnet50"}).status_code == 404


def test_an_embedding_is_the_class_token(client):
    image = "data:image/jpeg;base64," + base64.b64encode(PHOTO.read_bytes()).decode()
    response = client.post(
        "/v1/embeddings", json={"model": "timm.test_vit@random:norm", "input": image, "dimensions": 8}
    )
    model = seeded(timm.create_model, "test_vit")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.no_grad(), PIL.Image.open(PHOTO) as photo:
        token = model.forward_features(transform(photo.convert("RGB"))[None])[0, 0, :8]
    assert np.allclose(response.json()["data"][0]["embedding"], (token / token.norm()).numpy(), atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "pooled"),
    [
        ("test_vit", "token"),
        ("test_vit2", "avg"),  # after which it normalises, and it has a register
        ("cait_xxs24_224", "token"),
        ("deit_tiny_distilled_patch16_224", "token"),
        ("eva02_tiny_patch14_224", "avg"),
        ("mvitv2_tiny", "avg"),
        ("pit_ti_distilled_224", "token"),
        ("test_vit3", "map"),  # a slice lies between the tokens and their pooling
        ("vit_small_patch16_dinov3", "avg"),
    ],
)
def test_an_embedding_of_a_vit_is_what_its_head_pools(client, name, pooled):
    """timm's ``forward_head(…, pre_logits=True)``, but for the norm that some have between pooling and head."""
    image = "data:image/jpeg;base64," + base64.b64encode(PHOTO.read_bytes()).decode()
    response = client.post("/v1/embeddings", json={"model": f"timm.{name}@random:norm", "input": image})
    assert response.status_code == 200, response.text
    model = seeded(timm.create_model, name)
    assert model.global_pool == pooled
    model.fc_norm = torch.nn.Identity()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.no_grad(), PIL.Image.open(PHOTO) as photo:
        expected = model.forward_head(model.forward_features(transform(photo.convert("RGB"))[None]), pre_logits=True)
    assert np.allclose(response.json()["data"][0]["embedding"], expected[0].numpy(), atol=1e-4)


@pytest.mark.exhaustive
def test_tokens_of_a_named_extractor_are_pooled_by_attention(client):
    """Its own answers stay the tokens."""
    image = "data:image/jpeg;base64," + base64.b64encode(PHOTO.read_bytes()).decode()
    spec = {"model": "timm.test_vit3", "weights": "random", "return_nodes": {"norm": "tokens"}, "name": "pooled"}
    assert client.post("/v1/extractors?wait=60", json=spec).status_code == 201
    found = client.post("/v1/embeddings", json={"model": "pooled", "input": image}).json()
    named = client.post("/v1/embeddings", json={"model": "timm.test_vit3@random:attn_pool", "input": image}).json()
    assert found["model"] == "pooled"
    assert found["data"] == named["data"]
    tokens = client.post("/v1/extractors/pooled/features", json={"images": [image]}).json()["outputs"][0]
    assert (tokens["name"], tokens["shape"]) == ("tokens", [1, 101, 96])


def test_poolings_joined_in_a_query(client):
    """Written with a plus sign, which is a space in a query, or percent-encoded."""
    path = "/v1/models/timm.test_vit/features?nodes=norm&weights=random"
    headers = {"Content-Type": "image/jpeg", "Accept": "application/x-npy"}
    one, other, joined, encoded = (
        np.load(io.BytesIO(client.post(f"{path}&pool={pool}", content=PHOTO.read_bytes(), headers=headers).content))
        for pool in ("cls", "avg", "cls+avg", "cls%2Bavg")
    )
    assert np.array_equal(joined, np.concatenate([one, other], axis=1))
    assert np.array_equal(joined, encoded)
    wrong = client.post(f"{path}&pool=cls+sum", content=PHOTO.read_bytes(), headers=headers).json()
    assert wrong["type"] == "/problems/invalid-request"
    assert "one or more of avg, max, gem, cls joined by +" in wrong["detail"]


def test_registers_are_neither_a_class_token_nor_averaged(client):
    path = "/v1/models/timm.test_vit2/features?nodes=norm&weights=random"
    headers = {"Content-Type": "image/jpeg", "Accept": "application/x-npy"}
    refused = client.post(f"{path}&pool=cls", content=PHOTO.read_bytes(), headers=headers)
    assert (refused.status_code, refused.json()["type"]) == (422, "/problems/bad-tensor")
    assert "none of them a class token" in refused.json()["detail"]
    tokens, pooled = (
        np.load(io.BytesIO(client.post(f"{path}&pool={pool}", content=PHOTO.read_bytes(), headers=headers).content))
        for pool in ("none", "avg")
    )
    count = timm.create_model("test_vit2").num_reg_tokens
    assert count == 1
    assert np.allclose(pooled, tokens[:, count:].mean(1), atol=1e-5)
    assert not np.allclose(pooled, tokens.mean(1), atol=1e-5)
