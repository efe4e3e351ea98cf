"""Attention maps over HTTP: per head, the very weights that the model uses, as queries and keys give them here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxcore import get_model, load_model
from fxcore.photos import photos
from tests.wire import SAFETENSORS, created, read, refused, sent

PIXELS = np.array(photos()[0].resize((224, 224)))[None]


def features(client: Any, id: str) -> Any:
    """Tensors by key, of one photograph."""
    return read(client.post(f"/v1/extractors/{id}/features", **sent(PIXELS, SAFETENSORS)))


@pytest.mark.exhaustive
def test_maps_are_the_weights_that_the_model_uses(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that torchvision's own module computes, seen in its call of softmax."""
    model, module, shape = "swin_t", "features.1.1.attn", (64, 3, 49, 49)
    node = f"{module}.attention"
    spec = {"model": model, "weights": "random", "backend": "eager", "transforms": ["attention_maps"]}
    detail = created(client, **spec, return_nodes={node: "map"})
    assert detail["outputs"][0]["shape"] == [None, *shape]
    assert detail["checks"]["transforms"]["applied"][0]["name"] == "attention_maps"
    maps = features(client, detail["id"])["map"]

    entry, softmax, seen = get_model(model), functional.softmax, []

    def seeing(*args: Any, **options: Any) -> Tensor:
        seen.append(softmax(*args, **options))
        return seen[-1]

    eager = load_model(entry, "random")
    eager.get_submodule(module).register_forward_pre_hook(lambda *_: monkeypatch.setattr(functional, "softmax", seeing))
    eager.get_submodule(module).register_forward_hook(lambda *_: monkeypatch.undo())
    with torch.no_grad():
        eager(entry.preprocessing().from_array(torch.from_numpy(PIXELS)))
    [expected] = seen
    assert torch.allclose(maps, expected.view(1, *shape), atol=1e-5)


@pytest.mark.exhaustive
def test_the_transform_brings_the_nodes_and_changes_no_other(client: Any) -> None:
    model, node, ordinary = "timm.test_vit", "blocks.0.attn.attention", "blocks.0.norm1"
    spec = {"model": model, "weights": "random", "backend": "eager"}
    listed, more = (client.get(f"/v1/models/{model}/nodes{q}").json() for q in ("", "?transforms=attention_maps"))
    assert all(n.endswith(".attention") for n in set(more["eval_nodes"]) - set(listed["eval_nodes"]))
    assert node in more["eval_nodes"]
    assert more["fingerprint"] == listed["fingerprint"]
    response = client.post("/v1/extractors", json={**spec, "return_nodes": [node, ordinary]})
    assert refused(response, "unknown-node")["name"] == node
    plain = created(client, **spec, return_nodes=[ordinary])["id"]
    opened = created(client, **spec, return_nodes=[ordinary, node], transforms=["attention_maps"])["id"]
    assert torch.equal(features(client, plain)[ordinary], features(client, opened)[ordinary])
    assert node in [n["name"] for n in client.get(f"/v1/extractors/{opened}/graph").json()["nodes"]]


def test_a_model_without_attention_has_no_such_nodes(client: Any) -> None:
    """Listing them is how a client learns that."""
    plain, more = (client.get(f"/v1/models/resnet18/nodes{q}").json() for q in ("", "?transforms=attention_maps"))
    assert more["eval_nodes"] == plain["eval_nodes"]
