"""Transforms over HTTP: the list, extractors made with them, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import fx, nn

from fxcore.passes import registry
from fxcore.photos import photos
from fxcore.transforms import Transform, list_transforms
from tests.service.conftest import checked
from tests.wire import NPZ, read, refused, sent


def spec(*transforms: Any, **changed: Any) -> dict[str, Any]:
    fields = {"model": "resnet18", "weights": "random", "return_nodes": ["C2", "layer1.0.conv1"], "backend": "eager"}
    return {**fields, "transforms": list(transforms), **changed}


IF_ANY = {"name": "remove", "optional": True}


def features(client: Any, id: str) -> dict[str, np.ndarray]:
    pixels = np.array(photos()[0].resize((224, 224)))[None]
    found = read(client.post(f"/v1/extractors/{id}/features", **sent(pixels)))
    return {name: value.numpy() for name, value in found.items()}


def test_all_passes_are_listed_with_their_parameters(client):
    found = {t["name"]: t for t in client.get("/v1/transforms").json()["transforms"]}
    assert list(found) == [t.name for t in list_transforms()]
    assert found["fuse_conv_bn"]["parameters"] == {}
    assert found["remove"]["parameters"]["dropout"] == {"type": "boolean", "default": True}
    assert all(t["description"].endswith(".") for t in found.values())
    assert found["fold_normalization"]["parameters"] == {}
    assert found["attention_maps"]["adds_nodes"]


def test_a_transformed_extractor_says_how_far_it_is_and_gives_the_same_values(client):
    plain = client.post("/v1/extractors", json=spec()).json()
    made = client.post("/v1/extractors", json=spec("fuse_conv_bn", IF_ANY | {"params": {"identity": False}}))
    assert made.status_code == 201, made.text
    detail = made.json()
    assert detail["id"] != plain["id"]
    assert 0 < checked(client, plain["id"])["max_rel_error"] < 1e-5
    assert 0 < detail["checks"]["max_rel_error"] < 1e-4
    assert detail["checks"]["transforms"]["speedup"] is None or detail["checks"]["transforms"]["speedup"] > 0
    applied = {a["name"]: a["changes"] for a in detail["checks"]["transforms"]["applied"]}
    assert applied == {"fuse_conv_bn": 4, "remove": 0}  # of five, the convolution that is asked for keeps its own
    assert set(detail["checks"]["transforms"]["outputs"]) == {"C2", "layer1.0.conv1"}
    before, after = features(client, plain["id"]), features(client, detail["id"])
    for key, value in before.items():
        assert np.linalg.norm(after[key] - value) <= 1e-4 * np.linalg.norm(value)
    code = client.get(f"/v1/extractors/{detail['id']}/code").text
    assert ".bn2(" not in code
    assert 'getattr(self.layer1, "0").bn1(' in code


@pytest.mark.exhaustive
def test_int8_on_eager_says_what_each_layer_costs_and_keeps_the_named_ones_in_float(client):
    int8 = {"precision": "int8", "return_nodes": ["C2"]}
    float32 = client.post("/v1/extractors", json=spec(return_nodes=["C2"])).json()
    made = client.post("/v1/extractors?wait=300", json=spec(**int8))
    assert made.status_code in (200, 201), made.text  # another test may have made it
    detail = made.json()
    assert (detail["backend"], detail["precision"], detail["outputs"][0]["dtype"]) == ("eager", "int8", "float32")
    candidate = detail["checks"]["candidates"][0]
    assert 0.98 < candidate["min_cosine"] < 1
    layers = detail["checks"]["layers"]
    assert layers[0].keys() == {"name", "sqnr", "relative", "cosine", "accumulated"}
    exact, rounded = features(client, float32["id"])["C2"], features(client, detail["id"])["C2"]
    cosine = float((exact * rounded).sum() / np.linalg.norm(exact) / np.linalg.norm(rounded))
    assert cosine == pytest.approx(candidate["min_cosine"], abs=0.005)
    keep = {"name": "keep_float", "params": {"nodes": [layers[0]["name"], "layer1.1"]}}
    kept = client.post("/v1/extractors?wait=300", json=spec(keep, backend="auto", **int8)).json()
    assert kept["backend"] == "eager"
    assert {e["name"] for e in kept["checks"]["layers"]}.isdisjoint({layers[0]["name"], "layer1.1.conv1"})
    assert kept["checks"]["candidates"][0]["min_cosine"] > candidate["min_cosine"]


@pytest.mark.exhaustive
def test_int8_that_is_too_far_is_refused_with_its_figures(client):
    """MobileNet v2 with fresh batch norms fades to nothing: int8 gives zeros."""
    far = spec(model="mobilenet_v2", precision="int8", return_nodes=["C5"], image_size=64)
    document = refused(client.post("/v1/extractors?wait=300", json=far), "backend-refused", "precision=float32")
    assert document["min_cosine"] < 0.98
    assert f"{document['min_cosine']:.4f}" in document["detail"]
    assert document["layers"][0]["sqnr"] < document["layers"][-1]["sqnr"]
    assert document["layers"][0]["name"] in document["detail"]


def test_folded_normalisation_leaves_it_out_of_the_preprocessing(client, photos):
    """The same photograph gives the same features, as pixels, as a file, and as a prepared tensor in [0, 1]."""
    plain = client.post("/v1/extractors", json=spec()).json()
    made = client.post("/v1/extractors", json=spec("fold_normalization")).json()
    assert plain["preprocessing"]["mean"] == [0.485, 0.456, 0.406]
    assert (made["preprocessing"]["mean"], made["preprocessing"]["std"]) == ([0.0] * 3, [1.0] * 3)
    assert made["checks"]["max_rel_error"] < 1e-5
    before, after = features(client, plain["id"]), features(client, made["id"])
    for extractor, found in ((plain, before), (made, after)):
        of_file = read(client.post(f"/v1/extractors/{extractor['id']}/features", **sent(photos["chelsea"], NPZ)))
        found |= {f"{key} of a file": value.numpy() for key, value in of_file.items()}
    for key, value in before.items():
        assert np.linalg.norm(after[key] - value) <= 1e-5 * np.linalg.norm(value), key


@pytest.mark.parametrize(
    ("model", "node"),
    [("fasterrcnn_mobilenet_v3_large_fpn", "backbone.body.0"), ("raft_small", "feature_encoder.convnormrelu")],
)
def test_normalisation_that_cannot_be_folded_is_said(client, model, node):
    response = client.post("/v1/extractors", json=spec("fold_normalization", model=model, return_nodes=[node])).json()
    assert (response["type"], response["transform"]) == ("/problems/cannot-transform", "fold_normalization")


@pytest.mark.exhaustive
def test_order_and_parameters_make_another_extractor_and_defaults_do_not(client):
    def id_of(*transforms: Any) -> str:
        return str(client.post("/v1/extractors", json=spec(*transforms)).json()["id"])

    assert id_of(IF_ANY) == id_of(IF_ANY | {"params": {"dropout": True}})
    assert id_of(IF_ANY) != id_of(IF_ANY | {"params": {"dropout": False}})
    assert id_of(IF_ANY, "fuse_conv_bn") != id_of("fuse_conv_bn", IF_ANY)
    assert id_of("fuse_conv_bn") == id_of({"name": "fuse_conv_bn", "optional": False})
    assert id_of("fuse_conv_bn") != id_of({"name": "fuse_conv_bn", "optional": True})


@pytest.mark.parametrize(
    ("step", "said"),
    [
        pytest.param(
            {"name": "replace_activation", "params": {"old": "gelu", "new": "relu"}},
            '"optional": true',
            marks=pytest.mark.exhaustive,
        ),
        ({"name": "attention_maps"}, "in the model; leave it out"),
    ],
)
def test_a_transform_that_finds_nothing_is_refused_unless_it_is_optional(client, step, said):
    """Before, behind and between others, of which each changes something."""
    change = {"name": "replace_activation", "params": {"old": "relu", "new": "silu"}}
    for transforms in ([step], [step, "fuse_conv_bn"], ["fuse_conv_bn", step, change], ["fuse_conv_bn", step]):
        document = refused(client.post("/v1/extractors", json=spec(*transforms)), "cannot-transform", said)
        assert (document["transform"], document["changes"]) == (step["name"], 0)
    made = client.post("/v1/extractors", json=spec("fuse_conv_bn", step | {"optional": True}))
    assert made.status_code in (200, 201), made.text
    applied = {a["name"]: a["changes"] for a in made.json()["checks"]["transforms"]["applied"]}
    assert applied == {"fuse_conv_bn": 4, step["name"]: 0}


def test_attention_maps_need_not_be_among_the_requested_nodes(client):
    step = {"model": "timm.test_vit", "return_nodes": ["blocks.0.norm1"]}
    made = client.post("/v1/extractors?wait=200", json=spec("attention_maps", **step))
    assert made.status_code in (200, 201), made.text


def test_a_transform_that_changes_values_is_served_and_said(client):
    change = {"name": "replace_activation", "params": {"old": "relu", "new": "gelu"}}
    detail = client.post("/v1/extractors", json=spec(change)).json()
    assert detail["state"] == "ready", detail
    assert detail["checks"]["max_rel_error"] > 1e-3
    assert detail["checks"]["transforms"]["allclose"] is False
    measured = checked(client, detail["id"])
    assert measured["max_rel_error"] > 1e-3  # of the model itself, though eager computes what it was told to exactly
    assert client.post(f"/v2/repository/models/{detail['id']}/unload").status_code == 200
    unloaded = client.get(f"/v1/extractors/{detail['id']}").json()["checks"]
    assert (unloaded["max_rel_error"], unloaded["transforms"]) == (measured["max_rel_error"], measured["transforms"])


def test_what_half_precision_is_compared_with_is_named(client):
    made = client.post("/v1/extractors", json=spec("fuse_conv_bn", precision="bfloat16"))
    assert made.json()["checks"]["reference"] == "eager bfloat16", made.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["C3", "layer2"])
def test_levels_and_paths_name_nodes_to_transforms(client, name):
    change = {"name": "insert_after", "params": {"node": name, "function": "sigmoid"}}
    made = client.post("/v1/extractors", json=spec(change, return_nodes=["C4"]))
    assert made.status_code == 201, made.text
    code = client.get(f"/v1/extractors/{made.json()['id']}/code").text
    assert "sigmoid(layer2_1_relu_1)" in code
    keep = {"name": "keep_float", "params": {"nodes": [name]}}
    kept = client.post("/v1/extractors", json=spec(keep, return_nodes=["C4"]))
    assert kept.status_code == 201, kept.text


@pytest.mark.parametrize(
    ("wrong", "kind", "fields"),
    [
        ("fuse_conv", "unknown-transform", {"name": "fuse_conv"}),
        ({"name": "remove", "params": {"relu": True}}, "bad-parameter", {"transform": "remove", "parameter": "relu"}),
        ({"name": "remove", "params": {"dropout": 1}}, "bad-parameter", {"parameter": "dropout"}),
        ({"name": "replace_activation", "params": {"old": "relu", "new": "os.system"}}, "bad-parameter", {}),
        ({"name": "remove", "code": "import os"}, "invalid-request", {}),
        (
            {"name": "insert_after", "params": {"node": "layer9", "function": "relu"}},
            "cannot-transform",
            {"node": "layer9"},
        ),
        (
            {"name": "insert_after", "params": {"node": "layer1.*", "function": "relu"}},
            "cannot-transform",
            {"detail": "insert_after: the graph has no node 'layer1.*'; name one of its nodes"},
        ),
        ({"name": "fold_normalization", "params": {"mean": [0.5]}}, "bad-parameter", {"parameter": "mean"}),
        ({"name": "attention_maps", "params": {"heads": [1]}}, "bad-parameter", {"parameter": "heads"}),
        (
            {"name": "replace_module", "params": {"old": "layer9.*", "new": "relu"}},
            "cannot-transform",
            {"node": "layer9.*"},
        ),
        (
            {"name": "replace_module", "params": {"old": "bn1", "new": "os.system"}},
            "bad-parameter",
            {"parameter": "new"},
        ),
        ({"name": "replace_module", "params": {"old": "conv1", "new": "relu"}}, "cannot-transform", {}),
        (
            {"name": "replace_module", "params": {"old": "maxpool", "new": "identity"}},
            "cannot-keep",
            {"node": "layer1.1.relu_1", "transform": "replace_module"},
        ),
    ],
)
def test_what_is_refused(client, wrong, kind, fields):
    document = refused(client.post("/v1/extractors", json=spec(wrong)), kind)
    assert {key: document[key] for key in fields} == fields
    assert kind != "unknown-transform" or document["suggestions"][0] == "fuse_conv_bn"


def test_a_pass_that_loses_a_node_is_refused_by_the_nodes_name(client, monkeypatch):
    """A pass with a defect: it says that it is exact, and forgets every ReLU."""

    def forget(module: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        for node in list(graph.nodes):
            if node.op == "call_module" and isinstance(module.get_submodule(node.target), nn.ReLU):
                node.replace_all_uses_with(node.args[0])
        made = fx.GraphModule(module, graph).eval()
        made.meta["transforms"] = (registry.Applied("forget", 1),)
        return made

    monkeypatch.setitem(registry._BY_NAME, "forget", Transform("forget", "Wrong.", {}, forget))
    response = client.post("/v1/extractors", json=spec("forget", return_nodes=["conv1", "layer1.0.relu"]))
    assert refused(response, "cannot-keep")["node"] == "layer1.0.relu"
