"""Each endpoint at least once, in a process of its own."""

import io
import threading
import time

import numpy as np
import pytest
import torch

JPEG = {"content-type": "image/jpeg"}


def test_operations(server):
    assert server.http.get("/healthz").json() == {"status": "ok"}
    assert server.http.get("/readyz").json()["ready"] is True
    assert "fxserve_requests_total" in server.http.get("/metrics").text
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "page/main.js" in page.text
    assert "/v1/extractors/{extractor}/features" in server.http.get("/openapi.json").json()["paths"]
    assert server.http.get("/docs").status_code == 200


def test_an_extractor_from_making_to_deleting(server, photos, reference):
    spec = {"model": "resnet18", "weights": "random", "return_nodes": {"layer3": "C4", "layer4": "C5"}, "name": "mine"}
    spec["image_size"] = 224  # no other test makes this one, and all of them share the server
    made = server.http.post("/v1/extractors", json=spec)
    assert made.status_code == 201
    path = made.headers["location"]
    assert server.http.post("/v1/extractors", json=spec).status_code == 200
    for shown in (path, "/v1/extractors/mine"):
        for field in ("id", "name", "outputs"):
            assert server.http.get(shown).json()[field] == made.json()[field]
    assert made.json()["id"] in [e["id"] for e in server.http.get("/v1/extractors").json()["extractors"]]
    assert "nodes" in server.http.get(f"{path}/graph").json()
    assert "def forward" in server.http.get(f"{path}/code").text

    response = server.http.post(f"{path}/features", content=photos["coffee"], headers=JPEG)
    assert response.headers["x-request-id"]
    assert "compute;dur=" in response.headers["server-timing"]
    for output in response.json()["outputs"]:
        value = torch.tensor(output["data"]).reshape(output["shape"])
        expected = reference("resnet18", output["node"], [photos["coffee"]])
        assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()

    assert server.http.delete(path).status_code == 204
    assert server.http.post(f"{path}/features", content=photos["coffee"], headers=JPEG).status_code == 404


def test_a_body_in_chunks(server, photos, reference):
    photo = photos["chelsea"]
    url = "/v1/models/resnet18/features?weights=random&nodes=C5"
    headers = {**JPEG, "accept": "application/x-npy"}
    response = server.http.post(url, content=iter([photo[:1000], photo[1000:]]), headers=headers)
    assert response.status_code == 200
    assert response.headers["x-fxserve-weights"] == "random"
    expected = reference("resnet18", "layer4.1.relu_1", [photo])
    found = torch.from_numpy(np.load(io.BytesIO(response.content)))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_other_requests_are_served_while_a_large_response_is_encoded(server, photos):
    url = "/v1/models/resnet18/features?weights=random&nodes=conv1"
    server.http.post(url, content=photos["chelsea"], headers=JPEG)
    files = [("file", ("a.jpg", photos["chelsea"], "image/jpeg"))] * 8

    def waits():
        """Seconds that each of those others took, and how many the large answer took."""
        responses, waited, started = [], [], time.perf_counter()
        large = threading.Thread(target=lambda: responses.append(server.http.post(url, files=files)))
        large.start()
        while large.is_alive():
            began = time.perf_counter()
            assert server.http.get("/healthz").status_code == 200
            waited.append(time.perf_counter() - began)
            time.sleep(0.02)
        assert len(responses[0].content) > 50_000_000
        return waited, time.perf_counter() - started

    for _ in range(5):  # a busy machine may stand still for a moment, but not each time
        waited, whole = waits()
        if max(waited) < 0.3 * whole:
            return
    pytest.fail(f"waited for {max(waited):.1f} of {whole:.1f} s")
