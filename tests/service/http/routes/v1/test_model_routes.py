import io

import jsonschema
import numpy as np
import PIL.Image
import pytest
import torch
import torchvision
from torchvision.models.feature_extraction import get_graph_node_names

from fxcore.backends import BACKENDS
from fxcore.models.catalog import get_model
from service.engine.backends.choice import served_precisions
from service.schemas.specs import ExtractorSpec
from tests.hostile_images import saved
from tests.wire import NPY, created, read, refused, sent


def test_all_models_of_torchvision(client):
    models = client.get("/v1/models?source=torchvision").json()["models"]
    assert [model["name"] for model in models] == torchvision.models.list_models()
    by_name = {model["name"]: model for model in models}
    assert by_name["resnet50"]["weights"] == ["IMAGENET1K_V1", "IMAGENET1K_V2"]
    assert by_name["resnet50"]["default_weights"] == "IMAGENET1K_V2"


def test_names_of_classes(client):
    meta = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.meta
    weights = client.get("/v1/models/resnet50?categories=true").json()["weights"]
    assert weights["IMAGENET1K_V2"]["category_names"] == meta["categories"]
    assert "category_names" not in client.get("/v1/models/resnet50").json()["weights"]["IMAGENET1K_V2"]
    weights = client.get("/v1/models/efficientnet_lite0?categories=true").json()["weights"]
    assert weights["IMAGENET1K"]["category_names"] == meta["categories"]
    assert weights["IMAGENET1K"]["cached"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("task=optical_flow", {"raft_large", "raft_small"}),
        ("q=RESNET1", {n for n in torchvision.models.list_models() if "resnet1" in n}),
        ("task=segmentation&q=resnet50", {"deeplabv3_resnet50", "fcn_resnet50"}),
        ("q=nothing-like-it", set()),
        ("source=torchvision&q=resnet18", {"resnet18", "quantized_resnet18"}),
        ("source=own", set()),
        ("source=packaged&q=lite0", {"efficientnet_lite0"}),
        ("q=efficientnet_lite0", {"efficientnet_lite0"}),
    ],
)
def test_models_by_task_and_name(client, query, expected):
    assert {model["name"] for model in client.get(f"/v1/models?{query}").json()["models"]} == expected


def test_an_empty_task_or_name_is_not_given(client):
    everything = client.get("/v1/models").json()
    assert client.get("/v1/models?task=&q=").json() == everything
    assert everything["models"]


@pytest.mark.parametrize("task", ["clasification", "Detection"])
def test_an_unknown_task_is_refused(client, task):
    response = client.get("/v1/models", params={"task": task})
    assert response.status_code == 422
    assert response.json()["type"] == "/problems/invalid-request"
    assert "'classification', 'quantization', 'segmentation', 'detection', 'video' or" in response.json()["detail"]


def test_loaded_models_say_so(make_client):
    client = make_client(models=["resnet18", "squeezenet1_1"])
    created(client, model="squeezenet1_1", weights="random", return_nodes=["features.3"])
    loaded = {model["name"]: model["loaded"] for model in client.get("/v1/models").json()["models"]}
    assert loaded == {"resnet18": False, "squeezenet1_1": True}


@pytest.mark.exhaustive
def test_precisions_are_served_as_it_is_said(client):
    said = client.get("/v1/models/squeezenet1_1").json()["precisions"]
    assert list(said) == ["float32", "bfloat16", "float16", "int8"]
    for precision, how in said.items():
        spec = {"model": "squeezenet1_1", "weights": "random", "return_nodes": ["features.3"], "precision": precision}
        made = client.post("/v1/extractors?wait=60", json=spec)
        if how["backends"]:
            assert (made.json()["backend"], made.json()["note"]) == (how["backends"][-1], how["note"])
        else:
            assert (made.status_code, made.json()["detail"]) == (422, how["note"])


def test_int8_models_are_served_in_float32_only(client):
    said = client.get("/v1/models/quantized_resnet18").json()["precisions"]
    assert {precision for precision, how in said.items() if how["backends"]} == {"float32"}


def test_a_slow_precision_is_said(make_client, monkeypatch, photos):
    """On a processor without bfloat16, before anybody waits for it and with each answer."""
    for module in ("fxcore.backends", "fxcore.backends.openvino"):
        monkeypatch.setattr(f"{module}.computes_bfloat16", lambda: False)
    entry, cpu = get_model("squeezenet1_1"), torch.device("cpu")
    lowered = served_precisions(cpu, entry, "random", lowering=True)
    assert lowered["bfloat16"]["backends"] == ["eager"]
    if BACKENDS["openvino"].unavailable(cpu, "float32") is None:
        assert lowered["float32"]["backends"] == ["openvino", "eager"]
    client = make_client()
    said = client.get("/v1/models/squeezenet1_1").json()["precisions"]
    assert said["float32"] == {"backends": ["eager"], "note": None}  # without lowering, as tests have it
    assert "takes longer here than float32" in said["bfloat16"]["note"]
    for precision in ("float32", "bfloat16"):
        url = f"/v1/models/squeezenet1_1/features?nodes=features.3&weights=random&pool=avg&precision={precision}"
        answer = client.post(url, **sent(photos["chelsea"]))
        assert answer.headers.get("x-fxserve-note") == said[precision]["note"]
    notes = {made["precision"]: made["note"] for made in client.get("/v1/extractors").json()["extractors"]}
    assert notes == {precision: said[precision]["note"] for precision in notes}


def test_one_model_agrees_with_torchvisions_own_words(client):
    detail = client.get("/v1/models/resnet50").json()
    for weights in torchvision.models.ResNet50_Weights:
        said = detail["weights"][weights.name]
        assert said["num_params"] == weights.meta["num_params"]
        assert said["url"] == weights.url
        assert said["metrics"] == weights.meta["_metrics"]
        assert said["categories"] == 1000
    preset = torchvision.models.ResNet50_Weights.DEFAULT.transforms()
    assert detail["preprocessing"]["resize_size"] == preset.resize_size == [232]
    assert detail["preprocessing"]["crop_size"] == preset.crop_size
    assert detail["preprocessing"]["mean"] == preset.mean
    assert detail["preprocessing"]["std"] == preset.std
    assert detail["preprocessing"]["interpolation"] == preset.interpolation.value
    assert detail["inputs"] == [{"name": "x", "layout": "NCHW", "shape": [None, 3, 224, 224]}]
    assert set(detail["levels"]) == {"C1", "C2", "C3", "C4", "C5"}


@pytest.mark.exhaustive
def test_one_model_with_other_weights_has_their_preprocessing(client):
    default = client.get("/v1/models/resnet50").json()
    assert client.get("/v1/models/resnet50?weights=IMAGENET1K_V2").json() == default
    assert client.get("/v1/models/resnet50?weights=random").json() == default
    detail = client.get("/v1/models/resnet50?weights=IMAGENET1K_V1").json()
    assert detail["preprocessing"]["resize_size"] == [256]
    assert {**detail, "preprocessing": None} == {**default, "preprocessing": None}
    detail = client.get("/v1/models/vit_b_16?weights=IMAGENET1K_SWAG_E2E_V1").json()
    preset = torchvision.models.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1.transforms()
    assert detail["preprocessing"]["crop_size"] == preset.crop_size == [384]
    assert detail["inputs"][0]["shape"] == [None, 3, 384, 384]
    assert detail["default_weights"] == "IMAGENET1K_V1"
    refused(client.get("/v1/models/resnet50?weights=IMAGENET1K_V9"), "unknown-weights")


@pytest.mark.parametrize("preprocess", ["default", "pil", "fast"])
def test_what_default_preprocessing_means_on_this_server(make_client, photos, preprocess):
    client = make_client(preprocess=preprocess)
    told = client.get("/v1/models/resnet18").json()["default_preprocess"]
    assert told["way"] == preprocess
    path = "/v1/models/resnet18/features?nodes=x&weights=random"
    # So that fast decodes it at half its size.
    large = saved(PIL.Image.open(io.BytesIO(photos["chelsea"])).resize((1804, 1200)), "JPEG")
    made = read(client.post(path, **sent(large, NPY)))
    # Python, but for the PIL image.
    names = {
        "torchvision": torchvision,
        "weights": torchvision.models.ResNet18_Weights.DEFAULT,
        "data": torch.frombuffer(bytearray(large), dtype=torch.uint8),
        "image": PIL.Image.open(io.BytesIO(large)),
    }
    if preprocess != "fast":
        meant = eval(told["meaning"].replace("PIL image", "image"), names)
        assert np.array_equal(made[0], meant.numpy())
    else:
        assert told["meaning"].startswith("as default")
        exact = read(client.post(f"{path}&preprocess=pil", **sent(large, NPY)))
        assert 1e-3 < np.abs(made - exact).mean() < 0.1


def test_whether_weights_are_on_this_machine(client, checkpoints):
    assert client.get("/v1/models/resnet18").json()["weights"]["IMAGENET1K_V1"]["cached"] is False
    (checkpoints / "resnet18-f37072fd.pth").touch()
    assert client.get("/v1/models/resnet18").json()["weights"]["IMAGENET1K_V1"]["cached"] is True


def test_nodes_are_torchvisions(client):
    train, evaluated = get_graph_node_names(torchvision.models.resnet18())
    response = client.get("/v1/models/resnet18/nodes?weights=random").json()
    assert response["train_nodes"] == train
    assert response["eval_nodes"] == evaluated
    assert response["model"] == "resnet18"
    assert response["fingerprint"]


@pytest.mark.exhaustive
def test_the_default_weights_decide_what_is_listed(client):
    """With them googlenet has no auxiliary heads; torchvision is told so, as it tells itself on loading."""
    model = torchvision.models.googlenet(transform_input=True, aux_logits=False, init_weights=False)
    nodes = client.get("/v1/models/googlenet/nodes").json()
    assert nodes == client.get("/v1/models/googlenet/nodes?weights=DEFAULT").json()
    assert nodes == client.get("/v1/models/googlenet/nodes?weights=IMAGENET1K_V1").json()
    assert nodes["eval_nodes"] == get_graph_node_names(model)[1]
    assert "cat" in nodes["eval_nodes"]
    graph = client.get("/v1/models/googlenet/graph").json()
    assert [node["name"] for node in graph["nodes"]] == nodes["eval_nodes"]
    bare = client.get("/v1/models/googlenet/graph?weights=random").json()
    assert [node["name"] for node in bare["nodes"]] == client.get("/v1/models/googlenet/nodes?weights=random").json()[
        "eval_nodes"
    ]
    assert "cat" not in {node["name"] for node in bare["nodes"]}
    assert client.get("/v1/models/googlenet/graph?weights=file:mine.pth").json() == bare


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["googlenet", "deeplabv3_mobilenet_v3_large"])
def test_what_is_listed_is_what_an_extractor_has(client, model):
    """The same graph by its fingerprint, and levels are the nodes that an extractor takes for them."""
    nodes = client.get(f"/v1/models/{model}/nodes").json()
    detail = client.get(f"/v1/models/{model}").json()
    assert detail["levels"] == nodes["levels"]
    levels = list(nodes["levels"]) or nodes["eval_nodes"][-1:]
    spec = {"model": model, "return_nodes": levels}
    found = client.run(client.app.state.fxserve.engine.extractors.get(ExtractorSpec(**spec)))[0]
    assert found.description.fingerprint == nodes["fingerprint"]
    assert found.description.return_nodes == {
        level: nodes["levels"].get(level, {"node": level})["node"] for level in levels
    }
    client.delete(f"/v1/extractors/{found.id}")


def test_nodes_are_written_once(client):
    response = client.get("/v1/models/resnet50/nodes").content
    key = ("nodes", "resnet50", "IMAGENET1K_V2", None)
    assert client.app.state.fxserve.documents.get(key) == response
    client.app.state.fxserve.documents.put(key, b"kept")
    assert client.get("/v1/models/resnet50/nodes").content == b"kept"
    client.app.state.fxserve.documents.put(key, response)


def test_untraceable_parts_are_named(client):
    nodes = client.get("/v1/models/fasterrcnn_mobilenet_v3_large_fpn/nodes").json()
    graph = client.get("/v1/models/fasterrcnn_mobilenet_v3_large_fpn/graph").json()
    assert nodes["closed"] == graph["closed"]
    assert "roi_heads" in {part["path"] for part in nodes["closed"]}
    assert all(part["reason"] for part in nodes["closed"])
    assert any(name.startswith("backbone.body") for name in nodes["eval_nodes"])
    assert client.get("/v1/models/resnet18/nodes").json()["closed"] == []


def test_graph_as_json(client):
    graph = client.get("/v1/models/resnet18/graph").json()
    assert graph["model"] == "resnet18"
    assert graph["input_shape"] == [None, 3, 224, 224]
    assert graph["totals"]["params"] == torchvision.models.ResNet18_Weights.DEFAULT.meta["num_params"]
    nodes = {node["name"]: node for node in graph["nodes"]}
    assert list(nodes) == client.get("/v1/models/resnet18/nodes").json()["eval_nodes"]
    conv = nodes["layer2.0.downsample.0"]
    assert conv["shape"] == [None, 128, 28, 28]
    assert (conv["channels"], conv["stride"], conv["layout"], conv["params"]) == (128, 8, "NCHW", 64 * 128)
    assert conv["users"] == ["layer2.0.downsample.1"]


def test_graph_for_another_size(client):
    graph = client.get("/v1/models/resnet18/graph?height=64&width=96").json()
    assert graph["input_shape"] == [None, 3, 64, 96]
    assert {node["name"]: node["shape"] for node in graph["nodes"]}["layer4.1.relu_1"] == [None, 512, 2, 3]


@pytest.mark.parametrize(
    ("format", "accept", "media_type", "begins"),
    [
        ("json", "application/json", "application/json", "{"),
        ("table", "text/plain", "text/plain", "opcode"),
        ("dot", "text/vnd.graphviz", "text/vnd.graphviz", "digraph"),
        ("svg", "image/svg+xml", "image/svg+xml", "<"),
        ("mermaid", "text/vnd.mermaid", "text/vnd.mermaid", ""),
    ],
)
def test_graph_formats(client, format, accept, media_type, begins):
    by_query = client.get(f"/v1/models/resnet18/graph?format={format}", headers={"accept": "text/html, */*;q=0.1"})
    by_accept = client.get("/v1/models/resnet18/graph", headers={"accept": accept})
    for response in (by_query, by_accept):
        assert response.status_code == 200
        assert response.headers["content-type"].partition(";")[0] == media_type
        assert response.text.startswith(begins)
    assert by_query.content == by_accept.content


def test_graph_as_code(client):
    response = client.get("/v1/models/resnet18/graph?format=code")
    assert response.headers["content-type"].startswith("text/plain")
    assert "def forward(self, x" in response.text
    compile(response.text, "code", "exec")


@pytest.mark.parametrize(
    ("path", "headers", "status", "kind"),
    [
        ("/v1/models/resnet5O", {}, 404, "unknown-model"),
        ("/v1/models/resnet5O/nodes", {}, 404, "unknown-model"),
        ("/v1/models/resnet5O/graph", {}, 404, "unknown-model"),
        ("/v1/models/resnet18/nodes?weights=V9", {}, 422, "unknown-weights"),
        ("/v1/models/resnet18/graph?weights=V9", {}, 422, "unknown-weights"),
        ("/v1/models/resnet18/graph?height=64", {}, 422, "invalid-request"),
        ("/v1/models/resnet18/graph?height=0&width=9", {}, 422, "invalid-request"),
        ("/v1/models/resnet18/graph?height=9&width=99999999", {}, 422, "invalid-request"),
        ("/v1/models/resnet18/graph?format=pdf", {}, 422, "invalid-request"),
        ("/v1/models/resnet18/graph", {"accept": "application/pdf"}, 406, "not-acceptable"),
        ("/v1/models/vit_b_16/graph?height=100&width=100", {}, 422, "bad-tensor"),
        ("/v1/models/resnet18/edges", {}, 404, "not-found"),
    ],
)
def test_bad_requests_get_problem_documents(client, path, headers, status, kind):
    document = refused(client.get(path, headers=headers), kind, status=status)
    if kind == "unknown-model":
        assert "resnet50" in document["suggestions"]
    if kind == "unknown-weights":
        assert document["available"] == ["DEFAULT", "IMAGENET1K_V1", "random"]
    if status == 406:
        assert "image/svg+xml" in document["available"]


def test_a_layout_opens_the_modules_that_are_named(client):
    graph = "/v1/models/resnet18/graph"

    def kinds(query):
        found = client.get(f"{graph}?format=layout{query}").json()
        return {box["name"]: box["kind"] for box in found["boxes"]}

    closed = kinds("&open=")
    assert closed["layer3"] == "module"
    assert closed == kinds("&depth=1")
    opened = kinds("&open=layer3,layer3.0")
    assert (opened["layer3"], opened["layer3.0"], opened["layer3.1"]) == ("frame", "frame", "module")
    assert opened["layer3.0.conv1"] == "call_module"
    assert sum(kind not in ("frame", "module") for kind in kinds("").values()) == len(client.get(graph).json()["nodes"])
    for query in ("format=svg&open=layer3", "format=layout&depth=1&open=layer3"):
        response = client.get(f"{graph}?{query}")
        assert (response.status_code, response.json()["field"]) == (422, "open")


def test_graphs_are_as_they_are_documented(client):
    document = client.get("/openapi.json").json()
    id = created(client, model="resnet18", weights="random", return_nodes=["layer1"])["id"]
    for path, url in (
        ("/v1/models/{model}/graph", "/v1/models/resnet18/graph"),
        ("/v1/extractors/{extractor}/graph", f"/v1/extractors/{id}/graph"),
    ):
        documented = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        schema = jsonschema.Draft202012Validator({**documented, "components": document["components"]})
        for query in ("", "?format=json", "?format=layout", "?format=layout&depth=1"):
            graph = client.get(url + query).json()
            assert graph["model"] == "resnet18"
            schema.validate(graph)
