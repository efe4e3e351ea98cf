"""Extractors that begin at inner nodes: requests carry the values of these, one row an image."""

from __future__ import annotations

import PIL.Image
import pytest
import torch
from torch import Tensor
from torchvision.models.feature_extraction import create_feature_extractor

from fxcore import get_model, load_model
from tests.hostile_images import saved
from tests.service.conftest import Client, checked
from tests.wire import SAFETENSORS, close, created, images, read, refused, sent

PNG = saved(PIL.Image.new("RGB", (32, 32), "teal"), "PNG")
URL = "/v1/models/resnet18/features?weights=random&backend=eager"
RESNET18 = {"model": "resnet18", "weights": "random"}
END = {**RESNET18, "return_nodes": {"layer4": "end"}, "inputs": ["layer2"]}


@pytest.fixture(scope="module")
def values() -> dict[str, Tensor]:
    """What torchvision's own extractor gives for two random inputs of the model."""
    module = create_feature_extractor(load_model(get_model("resnet18"), "random"), ["layer2", "layer3", "layer4"])
    with torch.no_grad():
        found = module.eval()(torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    return {name: value.contiguous() for name, value in found.items()}


def test_the_second_half_gives_what_the_whole_does(client: Client, values: dict[str, Tensor]) -> None:
    part = sent({"layer2": values["layer2"]}, SAFETENSORS)
    found = read(client.post(f"{URL}&nodes=layer3,C5&inputs=layer2", **part))
    close(found["layer3"], values["layer3"])
    close(found["C5"], values["layer4"])


@pytest.mark.exhaustive
def test_v2_takes_as_many_inputs_as_an_extractor_has(client: Client) -> None:
    """A layer of DenseNet concatenates the values of all layers before it."""
    names = ["features.transition2.pool", *(f"features.denseblock3.denselayer{i}.conv2" for i in range(1, 18))]
    of = "features.denseblock3.denselayer18.norm1"
    created(client, model="densenet121", weights="random", return_nodes=[of], inputs=names, name="dense")
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
    found = read(client.post(f"{URL}&nodes=C5&inputs=C4", **sent(values["layer3"], SAFETENSORS)))
    close(found["C5"], values["layer4"])


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
    refused(client.post(f"{URL}&nodes={nodes}&inputs={inputs}", **sent(tensors)), slug, said)


def test_images_are_refused(client: Client) -> None:
    response = client.post(f"{URL}&nodes=layer4&inputs=layer2", json=images([b"GIF89a"]))
    refused(response, "bad-tensor", "send tensors: layer2")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("fold_normalization", "begins at inner nodes"),
        ("layer1", "'layer1.1.relu_1' lies before the inputs; name an input or a node after them"),
        ("fc", "the graph has no node 'fc'"),
    ],
)
def test_transforms_of_what_is_outside_the_part_are_refused(client: Client, step: str, said: str) -> None:
    insert = {"name": "insert_after", "params": {"node": step, "function": "relu"}}
    transforms = [step if step == "fold_normalization" else insert]
    refused(client.post("/v1/extractors", json={**END, "transforms": transforms}), "cannot-transform", said)


def test_its_description_says_where_it_begins(client: Client) -> None:
    made = created(client, **END)
    assert made["inputs"] == [
        {"name": "layer2", "node": "layer2.1.relu_1", "layout": "NCHW", "shape": [None, 128, None, None]}
    ]
    assert made["outputs"][0]["shape"] == [None, 512, None, None]
    assert made["preprocessing"] is None
    assert made["id"] == created(client, **END)["id"] != created(client, **END | {"inputs": ["layer3"]})["id"]
    assert checked(client, made["id"])["max_rel_error"] < 1e-5


def test_the_open_inference_protocol_has_its_inputs(client: Client, values: dict[str, Tensor]) -> None:
    id = created(client, **END)["id"]
    described = client.get(f"/v2/models/{id}").json()
    assert described["inputs"] == [{"name": "layer2", "datatype": "FP32", "shape": [-1, 128, -1, -1]}]
    assert described["outputs"] == [{"name": "end", "datatype": "FP32", "shape": [-1, 512, -1, -1]}]
    given = values["layer2"][:1]
    tensor = {"name": "layer2", "datatype": "FP32", "shape": list(given.shape), "data": given.flatten().tolist()}
    [output] = client.post(f"/v2/models/{id}/infer", json={"inputs": [tensor]}).json()["outputs"]
    close(torch.tensor(output["data"]), values["layer4"][:1].flatten())


def test_outputs_of_one_size_are_described_as_such(client: Client) -> None:
    """Those of a part that takes tokens, and those that no size of a map changes."""
    tokens = {"model": "timm.test_vit", "return_nodes": {"norm": "end"}, "inputs": ["blocks.2"]}
    for spec, shape in ((tokens, [101, 64]), ({"return_nodes": {"avgpool": "end", "fc": "of"}}, [512, 1, 1])):
        made = created(client, **END | spec)
        assert client.get(f"/v2/models/{made['id']}").json()["outputs"][0]["shape"] == [-1, *shape]
    assert created(client, **END | tokens)["outputs"][0]["shape"] == [None, 101, 64]


def test_groups_are_in_queries_and_specs_and_limited(client: Client) -> None:
    refused(client.post(f"{URL}&nodes=layer*,layer1.*", **sent(PNG)), "unknown-node")
    assert list(read(client.post(f"{URL}&nodes=layer1.*,fc", **sent(PNG)))) == ["layer1.0", "layer1.1", "fc"]
    spec = {"model": "vit_b_32", "weights": "random", "return_nodes": ["encoder.layers.*.*"]}
    problem = refused(client.post("/v1/extractors", json=spec), "too-many-nodes")
    assert problem["count"] > problem["limit"] == 64
