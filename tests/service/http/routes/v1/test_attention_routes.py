"""Attention maps over HTTP: per head, the very weights that the model uses, as queries and keys give them here."""

from __future__ import annotations

import io
from collections.abc import Callable
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


def of_vit(block: Any, x: Tensor) -> Tensor:
    x, attention = block.ln_1(x), block.self_attention
    q, k, _ = (x @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, -1)
    q, k = heads(q, attention.num_heads), heads(k, attention.num_heads)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


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


def of_maxvit(attention: Any, x: Tensor) -> Tensor:
    q, k, _ = attention.to_qkv(x).chunk(3, -1)
    q, k = heads(q, attention.n_heads), heads(k, attention.n_heads)
    size = round(x.shape[-2] ** 0.5)
    place = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
    down, right = place[:, :, None] - place[:, None, :] + size - 1
    bias = attention.relative_position_bias_table[down * (2 * size - 1) + right].permute(2, 0, 1)
    return (q @ (k / x.shape[-1] ** 0.5).mT + bias).softmax(-1)


CASES = [
    ("vit_b_32", "encoder.layers.encoder_layer_0", ".self_attention", ".ln", of_vit, (12, 50, 50)),
    ("swin_t", "features.1.0.attn", "", "", of_swin, (64, 3, 49, 49)),
    ("swin_t", "features.1.1.attn", "", "", of_swin, (64, 3, 49, 49)),
    ("maxvit_t", "blocks.0.layers.0.layers.window_attention.attn_layer.1", "", ".merge", of_maxvit, (64, 2, 49, 49)),
    ("maxvit_t", "blocks.0.layers.0.layers.grid_attention.attn_layer.1", "", ".merge", of_maxvit, (64, 2, 49, 49)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "module", "call", "beside", "reference", "shape"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES[1:])],
)
def test_maps_are_the_weights_that_the_model_uses(
    client: Any,
    model: str,
    module: str,
    call: str,
    beside: str,
    reference: Callable[[Any, Tensor], Tensor],
    shape: tuple[int, ...],
) -> None:
    node, ordinary = f"{module}{call}.attention", f"{module}{beside}"
    spec = {"model": model, "weights": "random", "backend": "eager", "return_nodes": {node: "map", ordinary: "beside"}}
    fused = {"name": "fuse_conv_bn", "optional": True}  # only some of the models have batch norms
    made = client.post("/v1/extractors?wait=200", json={**spec, "transforms": ["attention_maps", fused]})
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
        expected = reference(part, seen[0])
    assert maps.shape == expected.shape == (1, *shape)
    assert torch.allclose(maps, expected, atol=1e-5)
    assert torch.allclose(maps.sum(-1), torch.ones(()), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "node"),
    [
        ("vit_b_32", "encoder.layers.encoder_layer_0.self_attention.attention"),
        ("swin_t", "features.1.1.attn.attention"),
    ],
)
@pytest.mark.exhaustive
def test_the_transform_brings_the_nodes_and_changes_no_other(client: Any, model: str, node: str) -> None:
    ordinary = node.replace(".self_attention.attention", ".ln").replace(".attn.attention", ".norm1")
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
    """Listing them is how a client learns that. A spec with the transform asks for what does not exist."""
    plain, more = (client.get(f"/v1/models/resnet18/nodes{q}").json() for q in ("", "?transforms=attention_maps"))
    assert more["eval_nodes"] == plain["eval_nodes"]
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["C4"], "transforms": ["attention_maps"]}
    assert client.post("/v1/extractors?wait=600", json=spec).json()["type"] == "/problems/cannot-transform"
