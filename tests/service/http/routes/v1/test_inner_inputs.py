"""Extractors that begin at inner nodes: requests carry the values of these, one row an image."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from torchvision.models.feature_extraction import create_feature_extractor

from fxcore import get_model, load_model
from tests.hostile_images import saved
from tests.service.conftest import Client, checked

PNG = saved(PIL.Image.new("RGB", (32, 32), "teal"), "PNG")
SAFETENSORS = "application/x-safetensors"
URL = "/v1/models/resnet18/features?weights=random&backend=eager"


@pytest.fixture(scope="module")
def values() -> dict[str, Tensor]:
    """What torchvision's own extractor gives for two random inputs of the model."""
    module = create_feature_extractor(load_model(get_model("resnet18"), "random"), ["layer2", "layer3", "layer4"])
    with torch.no_grad():
        found = module.eval()(torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    return {name: value.contiguous() for name, value in found.items()}


def sent(client: Client, url: str, tensors: Mapping[str, Tensor]) -> httpx.Response:
    headers = {"Content-Type": SAFETENSORS, "Accept": SAFETENSORS}
    return client.post(url, content=save(dict(tensors)), headers=headers)


def test_the_second_half_gives_what_the_whole_does(client: Client, values: dict[str, Tensor]) -> None:
    response = sent(client, f"{URL}&nodes=layer3,C5&inputs=layer2", {"layer2": values["layer2"]})
    assert response.status_code == 200, response.text
    found = load(response.content)
    for key, name in (("layer3", "layer3"), ("C5", "layer4")):
        assert torch.dist(found[key], values[name]) <= 1e-5 * values[name].norm()


@pytest.mark.exhaustive
def test_v2_takes_as_many_inputs_as_an_extractor_has(client: Client) -> None:
    """A layer of DenseNet concatenates the values of all layers before it."""
    names = ["features.transition2.pool", *(f"features.denseblock3.denselayer{i}.conv2" for i in range(1, 18))]
    of = "features.denseblock3.denselayer18.norm1"
    spec = {"model": "densenet121", "weights": "random", "return_nodes": [of], "inputs": names, "name": "dense"}
    assert client.post("/v1/extractors?wait=60", json=spec).status_code in (200, 201)
    values = [torch.full((1, 32 if i else 256, 1, 1), float(i)) for i in range(18)]
    inputs = [
        {"name": name, "datatype": "FP32", "shape": list(value.shape), "data": value.flatten().tolist()}
        for name, value in zip(names, values, strict=True)
    ]
    response = client.post("/v2/models/dense/infer", json={"inputs": inputs})
    assert response.status_code == 200, response.text
    with torch.no_grad():
        expected = load_model(get_model("densenet121"), "random").eval().get_submodule(of)(torch.cat(values, 1))
    torch.testing.assert_close(torch.tensor(response.json()["outputs"][0]["data"]), expected.flatten())


def test_an_array_is_the_one_input(client: Client, values: dict[str, Tensor]) -> None:
    body = io.BytesIO()
    np.save(body, values["layer3"].numpy())
    headers = {"Content-Type": "application/x-npy", "Accept": SAFETENSORS}
    response = client.post(f"{URL}&nodes=C5&inputs=C4", content=body.getvalue(), headers=headers)
    assert torch.dist(load(response.content)["C5"], values["layer4"]) <= 1e-5 * values["layer4"].norm()


@pytest.mark.parametrize(
    ("nodes", "inputs", "shape", "slug", "said"),
    [
        (
            "layer4",
            "layer2",
            (1, 5, 28, 28),
            "bad-tensor",
            "values of layer2.1.relu_1 must be float32 [N, 128, any, any]",
        ),
        ("layer4", "layer2", (1, 128), "bad-tensor", "float32 [1, 128]"),
        ("layer4", "layer2.0.conv1", (1, 128, 28, 28), "open-cut", "give layer2.0.downsample.1 too"),
        ("layer2", "layer4", (1, 512, 7, 7), "open-cut", "give layer2.1.relu_1 too"),
        ("layer4", "layer2,layer3", (1, 128, 28, 28), "unneeded-input", "'layer2'"),
        ("layer4", "layer3,C4", (1, 256, 14, 14), "duplicate-key", "layer3.1.relu_1, which is an input already"),
        ("layer4", "layer2,layer2", (1, 128, 28, 28), "duplicate-key", "each name needs a key of its own"),
        ("layer4", "layr2", (1, 128, 28, 28), "unknown-node", "did you mean layer2"),
        ("layer4", "layer2,", (1, 128, 28, 28), "invalid-request", "'inputs' has an empty name"),
        ("layer4", "x" * 257, (1, 128, 28, 28), "invalid-request", "'inputs' has a name of more than 256 characters"),
        ("layer4", ",".join("x" * 65), (1, 1), "invalid-request", "'inputs' has 65 names, and at most 64 are allowed"),
    ],
)
def test_what_cannot_be_is_said(
    client: Client, nodes: str, inputs: str, shape: tuple[int, ...], slug: str, said: str
) -> None:
    tensors = {name: torch.zeros(shape) for name in inputs.split(",")}
    response = sent(client, f"{URL}&nodes={nodes}&inputs={inputs}", tensors)
    assert (response.status_code, response.json()["type"]) == (422, f"/problems/{slug}")
    assert said in response.json()["detail"]


def test_images_are_refused(client: Client) -> None:
    body = {"images": [base64.b64encode(b"GIF89a").decode()]}
    response = client.post(f"{URL}&nodes=layer4&inputs=layer2", json=body)
    assert (response.status_code, response.json()["type"]) == (422, "/problems/bad-tensor")
    assert "send tensors: layer2" in response.json()["detail"]


def created(client: Client, **more: Any) -> dict[str, Any]:
    spec = {"model": "resnet18", "weights": "random", "return_nodes": {"layer4": "end"}, "inputs": ["layer2"]}
    response = client.post("/v1/extractors", json={**spec, **more})
    assert response.status_code in (200, 201), response.text
    made: dict[str, Any] = response.json()
    return made


def test_transforms_of_images_are_refused(client: Client) -> None:
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["C5"], "inputs": ["C3"]}
    response = client.post("/v1/extractors", json={**spec, "transforms": ["fold_normalization"]})
    assert (response.status_code, response.json()["type"]) == (422, "/problems/cannot-transform")
    assert "begins at inner nodes" in response.json()["detail"]


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("layer1", "'layer1.1.relu_1' lies before the inputs; name an input or a node after them"),
        ("fc", "the graph has no node 'fc'"),
    ],
)
def test_transforms_of_nodes_outside_the_part_are_refused(client: Client, node: str, said: str) -> None:
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["layer4"], "inputs": ["layer2"]}
    step = {"name": "insert_after", "params": {"node": node, "function": "relu"}}
    response = client.post("/v1/extractors", json={**spec, "transforms": [step]})
    assert (response.status_code, response.json()["type"]) == (422, "/problems/cannot-transform")
    assert said in response.json()["detail"]


def test_its_description_says_where_it_begins(client: Client) -> None:
    made = created(client)
    assert made["inputs"] == [
        {"name": "layer2", "node": "layer2.1.relu_1", "layout": "NCHW", "shape": [None, 128, None, None]}
    ]
    assert made["outputs"][0]["shape"] == [None, 512, None, None]
    assert made["preprocessing"] is None
    assert made["id"] == created(client)["id"] != created(client, inputs=["layer3"])["id"]
    assert checked(client, made["id"])["max_rel_error"] < 1e-5


def test_the_open_inference_protocol_has_its_inputs(client: Client, values: dict[str, Tensor]) -> None:
    id = created(client)["id"]
    described = client.get(f"/v2/models/{id}").json()
    assert described["inputs"] == [{"name": "layer2", "datatype": "FP32", "shape": [-1, 128, -1, -1]}]
    assert described["outputs"] == [{"name": "end", "datatype": "FP32", "shape": [-1, 512, -1, -1]}]
    given = values["layer2"][:1]
    tensor = {"name": "layer2", "datatype": "FP32", "shape": list(given.shape), "data": given.flatten().tolist()}
    [output] = client.post(f"/v2/models/{id}/infer", json={"inputs": [tensor]}).json()["outputs"]
    expected = values["layer4"][:1]
    assert torch.dist(torch.tensor(output["data"]).view(expected.shape), expected) <= 1e-5 * expected.norm()


def test_outputs_of_one_size_are_described_as_such(client: Client) -> None:
    """Those of a part that takes tokens, and those that no size of a map changes."""
    tokens = {"model": "timm.test_vit", "return_nodes": {"norm": "end"}, "inputs": ["blocks.2"]}
    for spec, shape in ((tokens, [101, 64]), ({"return_nodes": {"avgpool": "end", "fc": "of"}}, [512, 1, 1])):
        made = created(client, **spec)
        [output, *_] = client.get(f"/v2/models/{made['id']}").json()["outputs"]
        assert output["shape"] == [-1, *shape]
    assert created(client, **tokens)["outputs"][0]["shape"] == [None, 101, 64]


def test_groups_are_in_queries_and_specs_and_limited(client: Client) -> None:
    body = {"images": [base64.b64encode(PNG).decode()]}
    outputs = client.post(f"{URL}&nodes=layer*,layer1.*", json=body)
    assert outputs.json()["type"] == "/problems/unknown-node"
    outputs = client.post(f"{URL}&nodes=layer1.*,fc", json=body).json()["outputs"]
    assert [output["name"] for output in outputs] == ["layer1.0", "layer1.1", "fc"]
    spec = {"model": "vit_b_32", "weights": "random", "return_nodes": ["encoder.layers.*.*"]}
    response = client.post("/v1/extractors", json=spec)
    assert (response.status_code, response.json()["type"]) == (422, "/problems/too-many-nodes")
    assert response.json()["count"] > response.json()["limit"] == 64
