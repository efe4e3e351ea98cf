"""The OpenAPI document says everything that the service answers."""

import copy
import re

import jsonschema
import pytest

from service.app import create_app
from service.problems import Problem
from tests.wire import b64, sent


@pytest.fixture(scope="module")
def document():
    return create_app().openapi()


def test_every_parameter_has_an_example(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                shown = parameter.keys() | parameter["schema"].keys()
                assert {"example", "examples"} & shown, f"{method} {path}: {parameter['name']}"


def test_every_part_of_a_path_is_a_parameter(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            names = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"]
            assert names == re.findall(r"{(\w+)}", path), f"{method} {path}"


def test_every_json_document_has_a_valid_example(document):
    documents = 0
    for methods in document["paths"].values():
        for operation in methods.values():
            for body in (operation.get("requestBody", {}), *operation["responses"].values()):
                for media_type, content in body.get("content", {}).items():
                    if not media_type.endswith("json"):
                        continue
                    documents += 1
                    described = {**content["schema"], "components": document["components"]}
                    shown = [one["value"] for one in content.get("examples", {}).values()] or [content["example"]]
                    for example in shown:
                        jsonschema.Draft202012Validator(described).validate(example)
    assert documents > 100


@pytest.mark.parametrize("path", ["/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"])
def test_the_example_of_an_inference_is_answered(client, document, photos, path):
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    example = copy.deepcopy(content["example"])
    example["inputs"][0]["data"] = [b64(photos["rocket"])]  # in place of its shortened image
    example.setdefault("parameters", {})["weights"] = "random"
    response = client.post(path.format(name="resnet18", version=1), json=example)
    assert response.status_code == 200, response.text
    assert [output["name"] for output in response.json()["outputs"]] == [one["name"] for one in example["outputs"]]


@pytest.mark.parametrize("path", ["/v1/models/{model}/attributions", "/v1/extractors/{extractor}/attributions"])
def test_examples_of_attributions_have_only_images(document, path):
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert [list(example["value"]) for example in content["examples"].values()] == [["images"]]


def test_the_header_of_a_deadline_has_one_name(document):
    headers = [
        parameter["name"]
        for methods in document["paths"].values()
        for operation in methods.values()
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "header"
    ]
    assert set(headers) == {"X-Request-Timeout"}


def operations(document):
    """All but the V2 protocol's and OpenAI's, which say errors their own way."""
    for path, methods in document["paths"].items():
        if path in ("/v2", "/v1/embeddings") or path.startswith("/v2/"):
            continue
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_route_is_described(document):
    for name, operation in operations(document):
        assert operation.get("description"), name


def test_every_problem_is_an_example_somewhere(document):
    shown = set()
    # Not of any one route: no such route, no such method, our own defects, and what is no request yet.
    for slug, response in document["components"]["responses"].items():
        examples = response["content"]["application/problem+json"]["examples"]
        assert set(examples) == {slug}
        shown.add(slug)
    assert {"not-found", "method-not-allowed", "internal"} < shown
    for name, operation in operations(document):
        for status, response in operation["responses"].items():
            for media_type, content in response.get("content", {}).items():
                assert media_type == "application/problem+json" or int(status) < 400, name
                for slug, example in content.get("examples", {}).items():
                    assert example["value"]["type"] == f"/problems/{slug}"
                    assert str(example["value"]["status"]) == status
                    shown.add(slug)
    assert set(Problem.kinds) == shown


BUILDING = [
    ("get", "/v1/extractors/{extractor}/graph"),
    ("get", "/v1/extractors/{extractor}/code"),
    ("get", "/v1/extractors/{extractor}/export"),
    ("post", "/v1/extractors/{extractor}/features"),
    ("post", "/v1/models/{model}/features"),
    ("post", "/v1/embeddings"),
    ("post", "/v1/extractors"),
    ("post", "/v2/models/{name}/infer"),
    ("post", "/v2/models/{name}/versions/{version}/infer"),
    ("post", "/v2/repository/models/{name}/load"),
]
"""What has to wait for an extractor that may have to be built."""

FAILING = {
    "weights-unavailable": {"weights": "DEFAULT"},
    "unknown-weights": {"weights": "file:none.pth"},
    "cannot-transform": {"transforms": [{"name": "insert_after", "params": {"node": "layer9", "function": "relu"}}]},
    "cannot-keep": {"transforms": [{"name": "replace_module", "params": {"old": "maxpool", "new": "identity"}}]},
}
"""What the build of an extractor over resnet18 may end in, whatever the machine."""

OTHERS = {"bad-parameter", "backend-refused", "out-of-memory", "extractor-failed", "not-ready", "draining"}


def shown(operation, *statuses):
    """The kinds of problem that a route is documented to answer with these statuses."""
    contents = [operation["responses"].get(str(status), {}).get("content", {}) for status in statuses]
    return {kind for content in contents for one in content.values() for kind in one.get("examples", ())}


@pytest.mark.parametrize(("method", "path"), BUILDING)
def test_what_a_build_ends_in_is_documented_wherever_there_is_one(document, method, path):
    operation = document["paths"][path][method]
    assert shown(operation, *operation["responses"]) >= {*FAILING, *OTHERS}


@pytest.mark.parametrize("kind", FAILING)
def test_the_responses_of_a_failed_extractor_are_documented(client, document, photos, checkpoints, kind):
    (checkpoints / "resnet18-f37072fd.pth").write_bytes(b"cut short")
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["layer1"], "name": "failed"} | FAILING[kind]
    assert client.post("/v1/extractors", json=spec).json()["type"] == f"/problems/{kind}"
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3, 32, 32], "data": [0.5] * (3 * 32**2)}
    bodies = {
        "/v1/extractors/{extractor}/features": sent(photos["rocket"]),
        "/v2/models/{name}/infer": {"json": {"inputs": [tensor]}},
        "/v1/embeddings": {"json": {"model": "failed", "input": b64(photos["rocket"])}},
    }
    for method, path in BUILDING:
        if method == "get" or path in bodies:
            url = path.format(extractor="failed", name="failed")
            response = client.run(client.http.request(method, url, **bodies.get(path, {})))
            assert kind in shown(document["paths"][path][method], response.status_code), (path, response.text)
            if path == "/v1/embeddings":
                assert response.json()["error"]["code"] == kind.replace("-", "_")
            elif not path.startswith("/v2"):
                assert response.json()["type"] == f"/problems/{kind}"
    client.delete("/v1/extractors/failed")


def test_every_response_has_a_request_id_and_every_post_reads_a_body(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert all("X-Request-ID" in response["headers"] for response in operation["responses"].values()), path
            assert method != "post" or {"408", "413"} <= operation["responses"].keys(), path


def test_features_declare_their_media_types(document):
    for path in ("/v1/models/{model}/features", "/v1/extractors/{extractor}/features"):
        operation = document["paths"][path]["post"]
        assert set(operation["requestBody"]["content"]) == {
            "image/*",
            "multipart/form-data",
            "application/json",
            "application/x-npy",
            "application/x-safetensors",
        }
        assert set(operation["responses"]["200"]["content"]) == {
            "application/json",
            "application/x-safetensors",
            "application/x-npz",
            "application/x-npy",
            "image/png",
        }
        assert {"406", "413", "415", "422", "429", "503", "504"} <= operation["responses"].keys()
        assert {"pool", "dtype", "normalize", "preprocess", "encoding"} <= {p["name"] for p in operation["parameters"]}


def test_every_reference_leads_somewhere_and_every_schema_is_referred_to(document):
    names = re.findall(r"#/components/schemas/([^\"']+)['\"]", str(document))
    assert set(names) == document["components"]["schemas"].keys()


def test_every_field_has_an_example(document):
    bare = {"Problem", "Health"}
    for name, schema in document["components"]["schemas"].items():
        shown = {field for example in schema.get("examples", []) for field in example}
        for field, content in schema.get("properties", {}).items():
            refers = field in shown or "$ref" in str(content)
            assert name in bare or refers or {"examples", "const"} & content.keys(), f"{name}.{field}"
