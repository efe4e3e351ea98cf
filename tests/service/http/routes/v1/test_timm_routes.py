"""timm's models over the wire."""

from __future__ import annotations

import asyncio
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
from tests.wire import NPY, b64, created, images, read, refused, sent

PHOTO = Path(fxcore.photos.__file__).with_name("chelsea.jpg").read_bytes()
SPEC = {"model": "timm.test_vit", "weights": "random", "return_nodes": {"norm": "tokens"}}


def prepared(model):
    """The photo as timm prepares it for a model."""
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    return transform(PIL.Image.open(io.BytesIO(PHOTO)).convert("RGB"))[None]


def embedded(client, model, **more):
    response = client.post("/v1/embeddings", json={"model": model, "input": b64(PHOTO), **more})
    assert response.status_code == 200, response.text
    return response.json()["data"][0]["embedding"]


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
    asked = [
        client.get("/v1/models"),
        client.get("/v1/models?source=timm&q=test_vit"),
        client.get("/v1/models/timm.test_vit/nodes"),
        client.get("/v2/models/timm.test_vit"),
        client.post("/v1/extractors?wait=60", json=SPEC),
        client.post("/v1/embeddings", json={"model": "timm.test_vit@random:norm", "input": b64(PHOTO)}),
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
        client.post("/v1/models/timm.test_vitt/features?nodes=norm", **sent(b"")),
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
    found = read(client.post("/v1/models/timm.test_vit/features?weights=random&nodes=norm", **sent(PHOTO)))
    model = seeded(timm.create_model, "test_vit")
    with torch.no_grad():
        expected = model.forward_features(prepared(model))
    torch.testing.assert_close(found["norm"], expected, rtol=1e-5, atol=1e-4)


def test_windows_are_averaged_to_the_channels(client):
    """Their other axes are unknown, but not their channels."""
    name, path = "test_maxvit", "stages.0.blocks.0.attn_block.attn.proj"
    pixels = torch.rand(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    query = f"nodes={path}&weights=random&preprocess=none&pool=avg"
    found = read(client.post(f"/v1/models/timm.{name}/features?{query}", **sent(pixels, NPY)))
    windows = hooked(seeded(timm.create_model, name), path, pixels)
    assert windows.shape == (128, 5, 5, 32)
    np.testing.assert_allclose(found, windows.unflatten(0, (2, 64)).mean(dim=(1, 2, 3)), atol=1e-5)


def test_weights_that_cannot_be_had(client, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    response = client.post("/v1/models/timm.test_vit2/features?nodes=norm", **sent(PHOTO))
    problem = refused(response, "weights-unavailable", status=503)
    assert problem["file"] == "model.safetensors"
    assert problem["folder"].startswith(str(tmp_path))


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
    found = embedded(client, "timm.test_vit@random:norm", dimensions=8)
    model = seeded(timm.create_model, "test_vit")
    with torch.no_grad():
        token = model.forward_features(prepared(model))[0, 0, :8]
    assert np.allclose(found, token / token.norm(), atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "pooled"),
    [
        ("test_vit", "token"),
        ("test_vit2", "avg"),  # after which it normalises, and it has a register
        ("cait_xxs24_224", "token"),
        ("deit_tiny_distilled_patch16_224", "token"),
        ("mvitv2_tiny", "avg"),
        ("pit_ti_distilled_224", "token"),
        ("test_vit3", "map"),  # a slice lies between the tokens and their pooling
        ("vit_small_patch16_dinov3", "avg"),
    ],
)
def test_an_embedding_of_a_vit_is_what_its_head_pools(client, name, pooled):
    """timm's ``forward_head(…, pre_logits=True)``, but for the norm that some have between pooling and head."""
    found = embedded(client, f"timm.{name}@random:norm")
    model = seeded(timm.create_model, name)
    assert model.global_pool == pooled
    model.fc_norm = torch.nn.Identity()
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(prepared(model)), pre_logits=True)
    assert np.allclose(found, expected[0], atol=1e-4)


@pytest.mark.exhaustive
def test_tokens_of_a_named_extractor_are_pooled_by_attention(client):
    """Its own answers stay the tokens."""
    created(client, **SPEC | {"model": "timm.test_vit3", "name": "pooled"})
    assert embedded(client, "pooled") == embedded(client, "timm.test_vit3@random:attn_pool")
    tokens = read(client.post("/v1/extractors/pooled/features", json=images([PHOTO])))["tokens"]
    assert tokens.shape == (1, 101, 96)


def test_poolings_joined_in_a_query(client):
    """Written with a plus sign, which is a space in a query, or percent-encoded."""
    path = "/v1/models/timm.test_vit/features?nodes=norm&weights=random"
    one, other, joined, encoded = (
        read(client.post(f"{path}&pool={pool}", **sent(PHOTO, NPY))) for pool in ("cls", "avg", "cls+avg", "cls%2Bavg")
    )
    assert np.array_equal(joined, np.concatenate([one, other], axis=1))
    assert np.array_equal(joined, encoded)
    wrong = client.post(f"{path}&pool=cls+sum", **sent(PHOTO))
    refused(wrong, "invalid-request", "one or more of avg, max, gem, cls joined by +")


def test_registers_are_neither_a_class_token_nor_averaged(client):
    path = "/v1/models/timm.test_vit2/features?nodes=norm&weights=random"
    refused(client.post(f"{path}&pool=cls", **sent(PHOTO)), "bad-tensor", "none of them a class token")
    tokens, pooled = (read(client.post(f"{path}&pool={pool}", **sent(PHOTO, NPY))) for pool in ("none", "avg"))
    count = timm.create_model("test_vit2").num_reg_tokens
    assert count == 1
    assert np.allclose(pooled, tokens[:, count:].mean(1), atol=1e-5)
    assert not np.allclose(pooled, tokens.mean(1), atol=1e-5)
