"""Query parameters and fields that a route does not know are refused: ignored, they would answer another question."""

import pytest

from service.app import create_app
from tests.wire import refused

ROUTES = [
    (method.upper(), path, {p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"})
    for path, methods in create_app().openapi()["paths"].items()
    for method, operation in methods.items()
    if path.startswith("/v1")
]


@pytest.mark.parametrize(
    ("method", "path", "known"), ROUTES, ids=lambda value: value if isinstance(value, str) else ",".join(sorted(value))
)
def test_every_route_of_v1_lists_what_it_knows(client, method, path, known):
    path = path.format(model="resnet18", extractor="none-such", image="0" * 16)
    response = client.run(client.http.request(method, f"{path}?weigths=random"))
    if path == "/v1/embeddings":  # in OpenAI's shape
        assert response.status_code == 400
        assert "'weigths': unknown parameter, this route takes none" in response.json()["error"]["message"]
        return
    document = refused(response, "invalid-request", "'weigths'")
    assert set(document["known"]) == known
    assert document["errors"][0]["in"] == "query"
    assert document["errors"][0]["field"] == "weigths"
    if "weights" in known:
        assert "did you mean 'weights'?" in document["detail"]


FEATURES = "/v1/models/resnet18/features?weights=random&nodes=C4"
SPEC = {"model": "resnet18", "return_nodes": ["C4"]}


@pytest.mark.parametrize(
    ("path", "body", "field", "said"),
    [
        ("/v1/extractors", {"model": "resnet18", "return_node": ["C4"]}, "return_node", "did you mean 'return_nodes'?"),
        ("/v1/extractors", SPEC | {"nodes": ["C4"]}, "nodes", "fit, inputs"),
        ("/v1/extractors", SPEC | {"transforms": [{"name": "remove", "param": {}}]}, "param", "one of name, params, "),
        (FEATURES, {"images": [], "pool": "avg"}, "pool", "expected one of images, boxes, points, masks, edits"),
        (FEATURES, {"images": ["AAAA"], "edits": [{"nod": "C4"}]}, "nod", "did you mean 'node'?"),
    ],
)
def test_an_unknown_field_comes_first_with_those_known(client, path, body, field, said):
    document = refused(client.post(path, json=body), "invalid-request")
    first = document["errors"][0]
    assert (first["in"], first["field"].rpartition(".")[2]) == ("body", field)
    assert first["message"].startswith("unknown field, expected one of ")
    assert said in first["message"]
    assert first["message"] in document["detail"]


def test_one_that_is_given_twice(client):
    response = client.get("/v1/models/googlenet/nodes?weights=DEFAULT&weights=random")
    refused(response, "invalid-request", "given 2 times")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/", "/docs", "/openapi.json", "/v2"])
def test_what_probes_browsers_and_gateways_add_is_left_alone(client, path):
    assert client.get(f"{path}?utm_source=mail&t=1700000000").status_code == 200


def test_parameters_of_v2_belong_into_the_body(client):
    headers = {"Inference-Header-Content-Length": "0"}
    response = client.post("/v2/models/squeezenet1_1/infer?weights=random", content=b"x", headers=headers)
    assert response.status_code == 400
    assert "'weights' is not supported" in response.json()["error"]
