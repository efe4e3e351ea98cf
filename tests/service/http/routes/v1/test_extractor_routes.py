import asyncio
import gzip
import itertools
import json
import math
import sys
from dataclasses import asdict

import pytest

from service.engine import ExtractorRecord
from service.http.routes.v1.extractors import describe
from service.schemas.v1.extractors import OutputDetail
from tests.service.conftest import checked
from tests.wire import created, refused, sent

NUMBER = itertools.count()


def spec(**changed):
    return {"model": "resnet18", "weights": "random", "return_nodes": {"layer3": "C4", "layer4": "C5"}, **changed}


@pytest.fixture
def name():
    return f"test-{next(NUMBER)}"


def test_make_show_list_and_delete(client, name):
    made = client.post("/v1/extractors", json=spec(name=name, return_nodes={"C5": "b", "layer3": "a"}))
    assert made.status_code == 201
    detail = made.json()
    assert made.headers["location"] == f"/v1/extractors/{detail['id']}"
    assert detail["name"] == name
    assert detail["state"] == "ready"
    assert (detail["model"], detail["weights"], detail["precision"], detail["backend"]) == (
        "resnet18",
        "random",
        "float32",
        "eager",
    )
    fields = ("key", "node", "shape", "stride", "bytes_per_image", "dtype", "layout", "rows_per_image", "tokens")
    assert [tuple(output[field] for field in fields) for output in detail["outputs"]] == [
        ("b", "layer4.1.relu_1", [None, 512, 7, 7], 32, 4 * 512 * 7 * 7, "float32", "NCHW", 1, None),
        ("a", "layer3.1.relu_1", [None, 256, 14, 14], 16, 4 * 256 * 14 * 14, "float32", "NCHW", 1, None),
    ]
    assert detail["checks"]["reference"] == "eager float32"
    assert detail["fingerprint"] == client.get("/v1/models/resnet18/nodes").json()["fingerprint"]

    detail["checks"] = checked(client, detail["id"])  # where the first answer did not wait for it
    assert client.get(f"/v1/extractors/{detail['id']}").json() == detail
    assert client.get(f"/v1/extractors/{name}").json() == detail
    assert detail in client.get("/v1/extractors").json()["extractors"]

    assert client.delete(f"/v1/extractors/{name}").status_code == 204
    for path in (name, detail["id"]):
        assert client.get(f"/v1/extractors/{path}").json()["type"] == "/problems/unknown-extractor"
        assert client.delete(f"/v1/extractors/{path}").status_code == 404


@pytest.mark.parametrize(
    ("model", "node"), [("timm.test_vit", "norm"), ("swin_t", "features.1.1.attn.attention"), ("resnet18", "layer3")]
)
def test_outputs_are_described_as_documented(client, model, node):
    """With the fields of the schema alone, in tokens and windows as well."""
    transforms = ["attention_maps"] if "attention" in node else []
    made = created(client, model=model, weights="random", return_nodes=[node], transforms=transforms)
    [info] = client.app.state.fxserve.engine.records.get(made["id"]).outputs
    assert made["outputs"] == [OutputDetail.model_validate(asdict(info)).model_dump(mode="json")]


def test_an_output_is_described_in_few_calls(client):
    """On the event loop, and an extractor may have a thousand."""
    made = created(client, **spec())
    record = client.app.state.fxserve.engine.records.get(made["id"])
    large = ExtractorRecord(record.description, outputs=record.outputs * 50)
    calls = []
    sys.setprofile(lambda *call: calls.append(call[1]))
    try:
        describe(large)
    finally:
        sys.setprofile(None)
    assert len(calls) < 10 * len(large.outputs)


def test_the_same_spec_is_the_same_extractor(client):
    first = client.post("/v1/extractors", json=spec(return_nodes={"layer2": "same"}))
    # A level, and a full name, for what a path named before.
    for same in ({"C3": "same"}, {"layer2.1.relu_1": "same"}):
        again = client.post("/v1/extractors", json=spec(return_nodes=same))
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json()["id"] == first.json()["id"]
    other = client.post("/v1/extractors", json=spec(return_nodes={"layer2": "other"}))
    assert other.json()["id"] != first.json()["id"]


def test_without_waiting_it_is_still_being_built(make_client):
    client = make_client()
    made = client.post("/v1/extractors?wait=0", json=spec())
    assert made.status_code == 202
    assert made.json()["state"] == "building"
    done = client.post("/v1/extractors", json=spec())
    assert done.status_code == 200
    assert done.json()["state"] == "ready"
    assert done.json()["id"] == made.json()["id"]


def test_a_name_can_be_taken(client, name):
    client.post("/v1/extractors", json=spec(name=name))
    taken = client.post("/v1/extractors", json=spec(name=name, return_nodes=["layer1"]))
    refused(taken, "name-taken", status=409)


@pytest.mark.parametrize(
    ("changed", "status", "kind", "fields"),
    [
        ({"model": "resnet81"}, 404, "unknown-model", {"suggestions"}),
        ({"weights": "V9"}, 422, "unknown-weights", {"available", "suggestions"}),
        ({"weights": "file:../../etc/passwd"}, 422, "unknown-weights", {"available", "suggestions"}),
        ({"return_nodes": ["layer9"]}, 422, "unknown-node", {"name", "suggestions"}),
        ({"return_nodes": ["layer."]}, 422, "unknown-node", {"suggestions"}),
        ({"return_nodes": ["layer4("]}, 422, "unknown-node", {"suggestions"}),
        ({"return_nodes": {"layer3": "a", "layer4": "a"}}, 422, "duplicate-key", {"key"}),
        ({"return_nodes": ["layer3", "layer3"]}, 422, "duplicate-key", {"key"}),
        ({"return_nodes": []}, 422, "invalid-request", {"errors"}),
        ({"return_nodes": {}}, 422, "invalid-request", {"errors"}),
        ({"return_nodes": "layer3"}, 422, "invalid-request", {"errors"}),
        ({"return_nodes": ["x" * 300]}, 422, "invalid-request", {"errors"}),
        ({"return_nodes": {"layer3": "__metadata__"}}, 422, "invalid-request", {"errors"}),
        ({"return_nodes": {"layer3": "a\0b", "layer4": "a\0c"}}, 422, "invalid-request", {"errors"}),
        ({"precision": "float8"}, 422, "invalid-request", {"errors"}),
        ({"backend": "inductor", "precision": "int8"}, 422, "unsupported", {"field", "available"}),
        ({"transforms": ["magic"]}, 422, "unknown-transform", {"name", "suggestions"}),
        ({"image_size": 0}, 422, "invalid-request", {"errors"}),
        ({"image_size": True}, 422, "invalid-request", {"errors"}),
        ({"name": "no spaces"}, 422, "invalid-request", {"errors"}),
        ({"name": "../x"}, 422, "invalid-request", {"errors"}),
        ({"name": "0123456789ab"}, 422, "invalid-request", {"errors"}),
        ({"colour": "blue"}, 422, "invalid-request", {"errors"}),
    ],
)
def test_specs_that_cannot_be(client, changed, status, kind, fields):
    document = refused(client.post("/v1/extractors", json=spec(**changed)), kind, status=status)
    assert fields <= document.keys()


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "sub/own.pth", "..", "."])
def test_weights_files_are_not_paths(client, path):
    """And since none will ever have such a name, no failed extractor is listed for a later build."""
    before = client.get("/v1/extractors").json()
    said = f"resnet18 has no weights 'file:{path}'; ask for one of DEFAULT, IMAGENET1K_V1, random, file:NAME"
    refused(client.post("/v1/extractors", json=spec(weights=f"file:{path}")), "unknown-weights", said)
    assert client.get("/v1/extractors").json() == before


def test_suggestions_include_the_intended_name(client):
    document = client.post("/v1/extractors", json=spec(return_nodes=["layer5"])).json()
    assert document["suggestions"]
    for name in document["suggestions"]:
        created(client, **spec(return_nodes=[name]))


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "601", "soon"])
def test_wait_is_bounded(client, wait):
    refused(client.post(f"/v1/extractors?wait={wait}", json=spec()), "invalid-request")


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_spec_is_json(client, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    response = client.post("/v1/extractors", content=b'{"model": "resnet18"}', headers=headers)
    assert response.status_code == 415
    assert response.json()["available"] == ["application/json"]


def test_a_spec_is_not_compressed(client):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = client.post("/v1/extractors", content=gzip.compress(b"{}"), headers=headers)
    refused(response, "unsupported-media-type", "Content-Encoding 'gzip'", status=415)


def test_a_number_of_too_many_digits(client):
    """More than Python converts to an integer."""
    content = json.dumps(spec(image_size=0)).replace(": 0", ": " + "9" * 5000)
    response = client.post("/v1/extractors", content=content, headers={"content-type": "application/json"})
    refused(response, "invalid-request", "too many digits")


def test_weights_that_cannot_be_had(client, checkpoints):
    response = client.post("/v1/extractors", json=spec(weights="DEFAULT"))
    document = refused(response, "weights-unavailable", "weights=random", status=503)
    assert document["file"] == "resnet18-f37072fd.pth"
    assert document["folder"] == str(checkpoints)
    [failed] = [e for e in client.get("/v1/extractors").json()["extractors"] if e["weights"] == "IMAGENET1K_V1"]
    assert failed["state"] == "failed"
    assert failed["problem"]["type"] == "/problems/weights-unavailable"
    refused(client.get(f"/v1/extractors/{failed['id']}/code"), "weights-unavailable", status=503)
    assert client.delete(f"/v1/extractors/{failed['id']}").status_code == 204


def test_graph_and_code_are_of_what_runs(client):
    id = created(client, **spec(return_nodes=["layer1"]))["id"]
    graph = client.get(f"/v1/extractors/{id}/graph").json()
    names = [node["name"] for node in graph["nodes"]]
    assert names[-1] == "layer1.1.relu_1"
    assert not [name for name in names if name.startswith(("layer2", "fc"))]
    # conv1, bn1, and two blocks of two convolutions with their batch norms.
    assert graph["totals"]["params"] == 64 * 3 * 49 + 128 + 4 * (64 * 64 * 9 + 128)
    code = client.get(f"/v1/extractors/{id}/code")
    assert code.headers["content-type"].startswith("text/plain")
    assert "def forward(self, x" in code.text
    assert "layer2" not in code.text
    svg = client.get(f"/v1/extractors/{id}/graph", headers={"accept": "image/svg+xml"})
    assert svg.headers["content-type"] == "image/svg+xml"
    assert client.get(f"/v1/extractors/{id}/graph", headers={"accept": "text/csv"}).status_code == 406
    assert client.get("/v1/extractors/unknown/graph").status_code == 404
    assert client.get("/v1/extractors/unknown/code").status_code == 404


def test_the_graph_has_what_transforms_change_and_add(client):
    transforms = [
        {"name": "fuse_conv_bn"},
        {"name": "replace_activation", "params": {"old": "relu", "new": "tanh"}},
        {"name": "insert_after", "params": {"node": "maxpool", "function": "sigmoid"}},
    ]
    made = client.post("/v1/extractors", json=spec(return_nodes=["layer1.0.bn1"], transforms=transforms)).json()
    document = client.get(f"/v1/extractors/{made['id']}/graph").json()
    nodes = [(node["name"], node["target"], node["args"], node["users"]) for node in document["nodes"]]
    assert nodes == [
        ("x", "x", [], ["bn1"]),
        ("bn1", "conv1", ["x"], ["relu"]),
        ("relu", "torch.tanh", ["bn1"], ["maxpool"]),
        ("maxpool", "maxpool", ["relu"], ["maxpool.sigmoid"]),
        ("maxpool.sigmoid", "torch.sigmoid", ["maxpool"], ["layer1.0.bn1"]),
        ("layer1.0.bn1", "layer1.0.conv1", ["maxpool.sigmoid"], ["output"]),
    ]
    weights = [64 * 3 * 49, 64 * 64 * 9]
    flops = 2 * weights[0] * 112**2 + 2 * weights[1] * 56**2
    assert document["totals"] == {"params": sum(weights) + 2 * 64, "flops": flops, "nodes": 6}


def test_the_graph_begins_at_the_inputs(client):
    made = client.post("/v1/extractors", json=spec(return_nodes=["layer3.0.bn1"], inputs=["layer3.0.conv1"])).json()
    document = client.get(f"/v1/extractors/{made['id']}/graph").json()
    nodes = [(node["name"], node["op"], node["args"]) for node in document["nodes"]]
    assert nodes == [("layer3.0.conv1", "placeholder", []), ("layer3.0.bn1", "call_module", ["layer3.0.conv1"])]
    assert document["totals"] == {"params": 2 * 256, "flops": 0, "nodes": 2}
    assert document["input_shape"] == made["inputs"][0]["shape"] == [None, 256, None, None]


@pytest.mark.parametrize("of", ["/v1/models/resnet18", "/v1/extractors/{id}"])
def test_accept_chooses_the_format_of_a_graph(client, of):
    url = of.format(id=client.post("/v1/extractors", json=spec()).json()["id"]) + "/graph"
    for lines in (["text/vnd.mermaid"], ["text/html", "text/vnd.mermaid"], ["text/html, text/vnd.mermaid"]):
        response = client.get(url, headers=[("accept", line) for line in lines])
        assert response.headers["content-type"].partition(";")[0] == "text/vnd.mermaid"
        assert response.headers["vary"] == "Accept"
    asked = client.get(f"{url}?format=dot", headers={"accept": "text/vnd.mermaid"})
    assert asked.headers["content-type"].partition(";")[0] == "text/vnd.graphviz"
    assert "vary" not in asked.headers


def test_a_profile_has_each_nodes_time_and_memory_and_serving_continues(client, photos):
    """Memory is that of the shapes, known beforehand; requests are answered meanwhile, between the runs."""
    url = f"/v1/extractors/{created(client, **spec(return_nodes=['layer1'], backend='eager'))['id']}"

    async def both():
        graph = asyncio.create_task(client.http.get(f"{url}/graph?profile=true"))
        features = await client.http.post(f"{url}/features", **sent(photos["chelsea"]))
        return await graph, features

    response, features = client.run(both())
    assert features.status_code == 200
    assert response.status_code == 200, response.text
    document = response.json()
    nodes = {node["name"]: node for node in document["profile"]["nodes"]}
    assert set(nodes) == {node["name"] for node in document["nodes"]}
    for node in document["nodes"]:
        if node["target"].endswith(("conv1", "conv2")):
            assert nodes[node["name"]]["bytes"] == 4 * math.prod(node["shape"][1:])
    assert all(node["milliseconds"] > 0 for node in nodes.values())
    assert sum(node["share"] for node in nodes.values()) == pytest.approx(1)
    assert document["profile"]["runs"] == 5
    assert (document["profile"]["backend"], document["profile"]["precision"]) == ("eager", "float32")
    assert document["profile"]["serving"]["backend"] == "eager"
    assert document["profile"]["serving"]["milliseconds"] > 0
    assert client.get(f"{url}/graph?profile=true").content == response.content  # measured once
    assert "profile" not in client.get(f"{url}/graph").json()
    refused(client.get(f"{url}/graph?profile=true&format=svg"), "invalid-request")


def test_drawings_collapse_by_module(client):
    made = client.post("/v1/extractors", json=spec()).json()
    for url in (f"/v1/extractors/{made['id']}/graph", "/v1/models/resnet18/graph"):
        boxes = [client.get(url, params={"format": "dot", **d}).text.count("[label=") for d in ({"depth": 1}, {})]
        assert boxes[0] < 13 < 50 < boxes[1]
    assert client.get(url, params={"format": "dot", "depth": 0}).status_code == 422
