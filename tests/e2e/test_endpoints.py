"""Each endpoint at least once, in a process of its own."""

import base64
import io
import threading
import time

import numpy as np
import PIL.Image
import pytest
import safetensors.torch
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


def test_a_head_has_no_body(server):
    """The next answer of the connection begins right after it."""
    with server.connect() as connection:
        connection.sendall(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with connection.makefile("rb") as responses:
            received = responses.read()
    head, get, body = received.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    length = len(server.http.get("/v1/models").content)
    assert b"content-length: %d" % length in head.lower()
    assert (get[:15], body) == (b"HTTP/1.1 200 OK", b'{"status":"ok"}')


def test_an_extractor_from_making_to_deleting(server, photos, reference):
    spec = {"model": "resnet18", "weights": "random", "return_nodes": {"layer3": "C4", "layer4": "C5"}, "name": "mine"}
    spec["image_size"] = 224  # no other test makes this one, and all of them share the server
    made = server.http.post("/v1/extractors", json=spec)
    assert made.status_code == 201
    path = made.headers["location"]
    assert server.http.post("/v1/extractors", json=spec).status_code == 200
    assert server.http.get(path).json() == server.http.get("/v1/extractors/mine").json() == made.json()
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


def _bodies(photo):
    pixels = np.asarray(PIL.Image.open(io.BytesIO(photo)).convert("RGB"))[None]
    npy = io.BytesIO()
    np.save(npy, pixels)
    return {
        "image": {"content": photo, "headers": JPEG},
        "multipart": {"files": {"file": ("a.jpg", photo, "image/jpeg")}},
        "json": {"json": {"images": [base64.b64encode(photo).decode()]}},
        "npy": {"content": npy.getvalue(), "headers": {"content-type": "application/x-npy"}},
        "safetensors": {
            "content": safetensors.torch.save({"x": torch.from_numpy(pixels.copy())}),
            "headers": {"content-type": "application/x-safetensors"},
        },
        "chunked": {"content": iter([photo[:1000], photo[1000:]]), "headers": JPEG},
    }


@pytest.mark.parametrize(
    ("body", "accept"),
    [
        ("image", "json"),
        ("multipart", "x-safetensors"),
        ("json", "x-npz"),
        ("npy", "x-npy"),
        ("safetensors", "x-safetensors"),
        ("chunked", "json"),
    ],
)
def test_every_body_and_every_response_type(server, photos, reference, body, accept):
    options = _bodies(photos["chelsea"])[body]
    headers = {**options.pop("headers", {}), "accept": f"application/{accept}"}
    url = "/v1/models/resnet18/features?weights=random&nodes=C5"
    response = server.http.post(url, headers=headers, **options)
    assert response.status_code == 200
    assert response.headers["content-type"] == f"application/{accept}"
    assert response.headers["x-fxserve-weights"] == "random"
    if accept == "json":
        [output] = response.json()["outputs"]
        value = torch.tensor(output["data"]).reshape(output["shape"])
    elif accept == "x-safetensors":
        value = safetensors.torch.load(response.content)["C5"]
    else:
        loaded = np.load(io.BytesIO(response.content), allow_pickle=False)
        value = torch.tensor(loaded["C5"] if accept == "x-npz" else loaded)
    expected = reference("resnet18", "layer4.1.relu_1", [photos["chelsea"]])
    assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()


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
