"""Which methods a path takes, as the OpenAPI document has them."""

import re

import pytest

GIVEN = {"image": "0" * 16, "model": "squeezenet1_1", "extractor": "for-methods", "name": "for-methods", "version": "1"}
CHANGING = {"date", "x-request-id"}


@pytest.fixture(scope="module")
def paths(client):
    """Path → methods, in capitals; what is named in a path is there."""
    spec = {"model": "squeezenet1_1", "weights": "random", "return_nodes": ["features.3"], "name": "for-methods"}
    assert client.post("/v1/extractors", json=spec).is_success
    documented = client.app.openapi()["paths"]
    return {path.format(**GIVEN): {method.upper() for method in methods} for path, methods in documented.items()}


def ask(client, method, path):
    return client.run(client.http.request(method, path))


def test_allow_has_every_method_of_a_path(client, paths):
    assert {"GET", "POST"} in paths.values()
    assert {"GET", "DELETE"} in paths.values()
    for path, methods in paths.items():
        allowed = methods | {"HEAD"} if "GET" in methods else methods
        for method in ("PUT", "PATCH", "BREW", "OPTIONS", *({"HEAD", "DELETE", "POST", "GET"} - allowed)):
            response = ask(client, method, path)
            assert response.status_code == 405, (method, path)
            assert set(re.split(", ", response.headers["allow"])) == allowed, (method, path)
            if method != "HEAD":
                document = response.json()
                said = document["error"] if "error" in document else document["detail"]
                said = said["message"] if path == "/v1/embeddings" else said
                assert said == f"{method} is not allowed on {path}; allowed: {response.headers['allow']}"
    assert ask(client, "PUT", "/docs").headers["allow"] == "GET, HEAD"


def test_a_head_is_that_of_the_get(client, paths):
    reads = [path for path, methods in paths.items() if "GET" in methods]
    for path in [*reads, "/docs", "/openapi.json", "/v1/models/nothing", "/v1/models?q=resnet", "/nothing"]:
        head, get = ask(client, "HEAD", path), ask(client, "GET", path)
        assert head.status_code == get.status_code, path
        assert head.content == b""
        changing = CHANGING | {"content-length"} if path == "/metrics" else CHANGING
        assert int(head.headers["content-length"]) > 0, path
        without = [{k: v for k, v in response.headers.items() if k not in changing} for response in (head, get)]
        assert without[0] == without[1], path


def test_a_head_is_counted_as_one(client):
    before = client.get("/metrics").text
    ask(client, "HEAD", "/v1/models/alexnet")
    series = 'fxserve_requests_total{method="HEAD",route="/v1/models/{model}",status="200"} '

    def count(text):
        return sum(float(line.removeprefix(series)) for line in text.splitlines() if line.startswith(series))

    assert count(client.get("/metrics").text) == count(before) + 1


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models/alexnet", 200), ("/v1/models/nothing", 404), ("/nothing", 404), ("/docs", 200)]
)
def test_a_head_is_one_line_of_the_access_log(client, caplog, path, status):
    caplog.set_level("INFO", "fxserve.access")
    assert ask(client, "HEAD", path).status_code == status
    [record] = [record for record in caplog.records if record.name == "fxserve.access"]
    assert record.getMessage().startswith(f"HEAD {path} {status} ")
    assert (record.fields["method"], record.fields["path"], record.fields["status"]) == ("HEAD", path, status)
