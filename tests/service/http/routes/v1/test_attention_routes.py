"""Attention maps over HTTP: per head, the very weights that the model uses, as queries and keys give them here."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fxcore import get_model, load_model
from fxcore.photos import photos

PIXELS = np.array(photos()[0].resize((224, 224)))[None]


def features(client: Any, id: str) -> Any:
    """Arrays by key, of one photograph."""
    body = io.BytesIO()
    np.save(body, PIXELS)
    sent = {"content-type": "application/x-npy", "accept": "application/x-npz"}
    response = client.post(f"/v1/extractors/{id}/features", content=body.getvalue(), headers=sent)
    assert response.status_code == 200, response.text
    return np.load(io.BytesIO(response.content))


def heads(x: Tensor, count: int) -> Tensor:
    """``[..., L, C]`` → ``[..., heads, L, C / heads]``."""
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


def of_swin(attention: Any, x: Tensor) -> Tensor:
    """With the shift: what the roll brings together from opposite borders does not see each other."""
    size, (shift, _) = attention.window_size[0], attention.shift_size
    across = x.shape[1] // size

    def windows(image: Tensor) -> Tensor:
        rolled = image.roll((-shift, -shift), (1, 2)).unflatten(2, (across, size)).unflatten(1, (across, size))
        return rolled.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)

    q, k, _ = attention.qkv(windows(x)).chunk(3, -1)
    q, k = heads(q, attention.num_heads), heads(k, attention.num_heads)
    place = torch.arange(size)
    away = (place[:, None] - place[None, :] + size - 1).repeat_interleave(size, 0).repeat_interleave(size, 1)
    down, right = away, (place[:, None] - place[None, :] + size - 1).repeat(size, size)
    bias = attention.relative_position_bias_table[down * (2 * size - 1) + right].permute(2, 0, 1)
    side = torch.arange(x.shape[1])
    border = torch.where(side < shift, 1, 0)
    came = windows((border[:, None] * 2 + border[None, :])[None, :, :, None].float())[..., 0]
    # Only windows that the seam runs through hold both kinds; in all others every position came the same way.
    apart = (came[..., None, :] != came[..., :, None]) * -100.0
    return (q @ k.mT / q.shape[-1] ** 0.5 + bias + apart[:, :, None]).softmax(-1)


@pytest.mark.exhaustive
def test_maps_are_the_weights_that_the_model_uses(client: Any) -> None:
    model, module, shape = "swin_t", "features.1.1.attn", (64, 3, 49, 49)
    node = f"{module}.attention"
    spec = {"model": model, "weights": "random", "backend": "eager", "return_nodes": {node: "map"}}
    made = client.post("/v1/extractors?wait=200", json={**spec, "transforms": ["attention_maps"]})
    assert made.status_code == 201, made.text
    detail = made.json()
    assert detail["outputs"][0]["shape"] == [None, *shape]
    assert detail["checks"]["transforms"]["applied"][0]["name"] == "attention_maps"
    maps = torch.from_numpy(features(client, detail["id"])["map"])

    entry, seen = get_model(model), []
    eager = load_model(entry, "random")
    part = eager.get_submodule(module)
    part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        eager(entry.preprocessing().from_array(torch.from_numpy(PIXELS)))
        expected = of_swin(part, seen[0])
    assert maps.shape == expected.shape == (1, *shape)
    assert torch.allclose(maps, expected, atol=1e-5)
    assert torch.allclose(maps.sum(-1), torch.ones(()), atol=1e-5)


@pytest.mark.exhaustive
def test_the_transform_brings_the_nodes_and_changes_no_other(client: Any) -> None:
    model, node, ordinary = "timm.test_vit", "blocks.0.attn.attention", "blocks.0.norm1"
    spec = {"model": model, "weights": "random", "backend": "eager"}
    listed, more = (client.get(f"/v1/models/{model}/nodes{q}").json() for q in ("", "?transforms=attention_maps"))
    assert all(n.endswith(".attention") for n in set(more["eval_nodes"]) - set(listed["eval_nodes"]))
    assert node in more["eval_nodes"]
    assert more["fingerprint"] == listed["fingerprint"]
    response = client.post("/v1/extractors", json={**spec, "return_nodes": [node, ordinary]}).json()
    assert (response["type"], response["name"]) == ("/problems/unknown-node", node)
    opened = {**spec, "return_nodes": [ordinary, node], "transforms": ["attention_maps"]}
    plain = client.post("/v1/extractors?wait=200", json={**spec, "return_nodes": [ordinary]}).json()["id"]
    opened_id = client.post("/v1/extractors?wait=200", json=opened).json()["id"]
    assert np.array_equal(features(client, plain)[ordinary], features(client, opened_id)[ordinary])
    assert node in [n["name"] for n in client.get(f"/v1/extractors/{opened_id}/graph").json()["nodes"]]


def test_a_model_without_attention_has_no_such_nodes(client: Any) -> None:
    """Listing them is how a client learns that."""
    plain, more = (client.get(f"/v1/models/resnet18/nodes{q}").json() for q in ("", "?transforms=attention_maps"))
    assert more["eval_nodes"] == plain["eval_nodes"]
